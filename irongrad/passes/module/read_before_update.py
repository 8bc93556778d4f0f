"""Keep IREE from updating a tensor before its other readers have read it.

A kernel's result that is written into a part of another tensor can be computed there. IREE 3.13.0 does that in three
passes, in this order (buildStreamAsyncPassPipeline in compiler/src/iree/compiler/Dialect/Stream/Transforms/Passes.cpp):

1. MaterializeCopyOnWrite copies the tensor before each update of it.
2. ElideAsyncCopies drops the copy if the update is the last user of the tensor: the other readers are before it.
3. EmplaceAllocations lets the kernel write into the tensor, and removes the update. If the tensor is made behind the
   kernel, tryMoveProducerBefore moves what makes it before the kernel, other updates in place included.

So step 3 moves a write from the update up to the kernel, before readers that step 2 saw before the write. No later pass
copies the tensor for them. The gradients of recurrent layers have such readers: two gradients of parts are padded with
the same zeros. More fusion puts more readers there: a kernel with several results stands where the first is needed.

This pass moves the kernel to its update. If other results of the kernel are read in between, the update gets a target
of its own instead. tests/passes/module/test_read_before_update.py tells when IREE is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER
from irongrad.mlir.updates import KERNEL, UPDATE, VIEW, targets_of, viewed
from irongrad.mlir.walk import around, constant_of, found_in, owner_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_EMPTY = "flow.tensor.empty"


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
        shared = [op for op in found_in(module, UPDATE, KERNEL) if _shared_targets(op)]
        updates = found_in(module, UPDATE)
        moved = sum(_separate(update, shared) for update in updates)
        # Only now: in IREE 3.13.0 another Python object of an erased operation, as in `shared`, reads freed memory.
        for update in updates:
            if not list(update.results[0].uses):
                update.erase()
        return PassResult(moved > 0, {"moved": moved})


def _separate(update: Any, shared: Sequence[Any]) -> bool:
    """Leave no reader between `update` and the kernel whose result it writes, of what the update or its target updates.

    Args:
        update: an update of a tensor by a part.
        shared: the operations that update a tensor with other readers.
    """
    chain = list(_made_by(update))
    kernel = chain[-1] if chain else None
    if kernel is None or not _overtakes(update, kernel, shared):
        return False
    if all(_is_unread_before(update, result) for result in kernel.results):
        for operation in reversed(chain):
            operation.move_before(update)
    elif not _rebuild(update):
        _hold(update)
    return True


def _made_by(update: Any) -> Iterator[Any]:
    """The views and the kernel that make the new part, from the update backwards; nothing if it is read elsewhere."""
    value, chain = _part(update), []
    while not isinstance(value.owner, ir.Block) and value.owner.operation.block == update.block:
        chain.append(value.owner.operation)
        if len(list(value.uses)) != 1 or chain[-1].name not in (VIEW, KERNEL):
            return
        if chain[-1].name == KERNEL:
            yield from chain
            return
        value = value.owner.operands[0]


def _overtakes(update: Any, kernel: Any, shared: Sequence[Any]) -> bool:
    """Whether a tensor is written before a reader of it, if `kernel` writes its result where `update` would."""
    between = [op for op in shared if op.block == kernel.block and kernel.is_before_in_block(op)]
    if not between:
        return False
    moved = _moved_with(update, kernel)
    readers = (r for op in between if op in moved for t in _shared_targets(op) for r in _readers_before(op, t))
    return any(kernel.is_before_in_block(reader) for reader in readers)


def _shared_targets(operation: Any) -> list[Any]:
    """The values that `operation` updates and that others read too."""
    targets = [viewed(target) for target in targets_of(operation)]
    # IREE makes an empty tensor for each reader.
    return [t for t in targets if owner_of(t).name != _EMPTY and next(_readers_before(operation, t), None)]


def _moved_with(update: Any, kernel: Any) -> set[Any]:
    """What IREE moves before `kernel` with the target of `update`: all that is behind the kernel and the target needs.

    The set contains the update, which the kernel replaces.
    """
    waiting, moved = [update], {update}
    while waiting:
        needed = [o.owner.operation for o in waiting.pop().operands if not isinstance(o.owner, ir.Block)]
        for owner in needed:
            if owner not in moved and owner.block == kernel.block and kernel.is_before_in_block(owner):
                moved.add(owner)
                waiting.append(owner)
    return moved


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
        if own.name == VIEW:
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
    while not isinstance(base.owner, ir.Block) and base.owner.name == UPDATE:
        parts.append(base.owner.operation)
        base = base.owner.operands[0]
    if owner_of(base).name != _EMPTY or not all(_are_apart(_place(update), _place(part)) for part in parts):
        return False
    for operation in (update, *reversed(parts)):
        written = operation.clone(ir.InsertionPoint(update))
        written.operands[0] = base
        base = written.results[0]
    update.results[0].replace_all_uses_with(base)
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
