"""Keep IREE from updating a tensor before its other readers have read it.

A kernel's result that is written into a part of another tensor can be computed there. IREE 3.13.0 does that in its pass
EmplaceAllocations (compiler/src/iree/compiler/Dialect/Stream/Transforms/EmplaceAllocations.cpp). So the write happens
where the kernel is, and no longer where the update is. IREE does not look at the readers of the tensor in between. The
gradients of recurrent layers have such readers: two gradients of parts are padded with the same zeros.

This pass moves the kernel to its update. If other results of the kernel are read in between, the update gets a target
of its own instead. tests/passes/module/test_read_before_update.py tells when IREE is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER
from irongrad.mlir.walk import around, constant_of, found_in, owner_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_UPDATE, _KERNEL = "flow.tensor.update", "flow.dispatch"
_VIEW, _EMPTY = "flow.tensor.reshape", "flow.tensor.empty"


@dataclass(frozen=True)
class ReadBeforeUpdate(ModulePass):
    """Leave no reader of a tensor between a kernel and the update of the tensor by the kernel's result.

    Before:
        %new = flow.dispatch @f(%x); %y = flow.dispatch @g(%t); %u = flow.tensor.update %new, %t[%c1]
    After:
        %y = flow.dispatch @g(%t); %new = flow.dispatch @f(%x); %u = flow.tensor.update %new, %t[%c1]
    """

    name: ClassVar[str] = "read-before-update"
    required: ClassVar[str] = "IREE updates tensors before their other readers have read them"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        moved = sum(map(_separate, found_in(module, _UPDATE)))
        return PassResult(moved > 0, {"moved": moved})


def _separate(update: Any) -> bool:
    """Leave no other reader of the target of `update` between it and the kernel whose result it writes."""
    target = _viewed(update.operands[0])
    if owner_of(target).name == _EMPTY:  # IREE makes one for each reader
        return False
    chain = list(_made_by(update))
    kernel = chain[-1] if chain else None
    if kernel is None or not any(kernel.is_before_in_block(r) for r in _readers_before(update, target)):
        return False
    if all(_is_unread_before(update, result) for result in kernel.results):
        for operation in reversed(chain):
            operation.move_before(update)
    elif not _rebuild(update):
        _hold(update)
    return True


def _viewed(value: Any) -> Any:
    while not isinstance(value.owner, ir.Block) and value.owner.name == _VIEW:
        value = value.owner.operands[0]
    return value


def _made_by(update: Any) -> Iterator[Any]:
    """The views and the kernel that make the new part, from the update backwards; nothing if it is read elsewhere."""
    value, chain = _part(update), []
    while not isinstance(value.owner, ir.Block) and value.owner.operation.block == update.block:
        chain.append(value.owner.operation)
        if len(list(value.uses)) != 1 or chain[-1].name not in (_VIEW, _KERNEL):
            return
        if chain[-1].name == _KERNEL:
            yield from chain
            return
        value = value.owner.operands[0]


def _part(update: Any) -> Any:
    """The value that an update writes into its target."""
    return next(o for o in list(update.operands)[1:] if isinstance(o.type, ir.RankedTensorType))


def _readers_before(update: Any, value: Any) -> Iterator[Any]:
    """The operations of the block that read `value`, directly, through views or in a region, before `update`."""
    for use in value.uses:
        user = use.owner.operation
        own = next((op for op in (user, *around(user.block)) if op.block == update.block), None)
        if own is None or own == update:
            continue
        if own.name == _VIEW:
            yield from _readers_before(update, own.results[0])
        elif own.is_before_in_block(update):
            yield own


def _is_unread_before(update: Any, result: Any) -> bool:
    """Whether nothing before `update` reads `result`, except for the views of it that `update` writes."""
    return not list(_readers_before(update, result))


def _rebuild(update: Any) -> bool:
    """Give an update a target of its own, if its target is joined from parts; return whether it is.

    The new part is written first, and then the others: the order of updates of different parts is free. IREE does not
    merge the new chain of updates with another one, because it begins with another part.
    """
    parts, base = [], update.operands[0]
    while not isinstance(base.owner, ir.Block) and base.owner.name == _UPDATE:
        parts.append(base.owner.operation)
        base = base.owner.operands[0]
    if owner_of(base).name != _EMPTY or not all(_are_apart(_place(update), _place(part)) for part in parts):
        return False
    for operation in (update, *reversed(parts)):
        written = operation.clone(ir.InsertionPoint(update))
        written.operands[0] = base
        base = written.results[0]
    update.results[0].replace_all_uses_with(base)
    update.erase()
    return True


def _place(update: Any) -> list[tuple[int, int]] | None:
    """For each dimension, where the part begins and ends that an update writes; None if it is not known."""
    offsets = [constant_of(o) for o in update.operands if isinstance(o.type, ir.IndexType)]
    shape = ir.RankedTensorType(_part(update).type)
    if not shape.has_static_shape or len(offsets) != shape.rank:
        return None
    known = [offset for offset in offsets if offset is not None]
    return [(o, o + size) for o, size in zip(known, shape.shape, strict=True)] if known == offsets else None


def _are_apart(a: list[tuple[int, int]] | None, b: list[tuple[int, int]] | None) -> bool:
    if a is None or b is None:
        return False
    return any(first[1] <= second[0] or second[1] <= first[0] for first, second in zip(a, b, strict=True))


def _hold(update: Any) -> None:
    """Put the new part behind a barrier, so that the kernel that makes it cannot write it into the target."""
    part = _part(update)
    place = [operand == part for operand in update.operands].index(True, 1)
    with update.location, ir.InsertionPoint(update):
        update.operands[place] = ir.Operation.create(BARRIER, [part.type], [part]).results[0]


PASS = ReadBeforeUpdate
