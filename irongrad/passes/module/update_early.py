"""Run updates as soon as their inputs exist, so that a gradient takes memory for a short time.

A step's update follows its backward. IREE 3.13.0 runs kernels in program order, as late as it can, so every gradient
stays live until the last one is computed. This pass moves each update directly after the last of its inputs and after
the last other reader of the state that it overwrites. The state may then be written in place
(`passes/module/state_in_place.py`). If the update needs all gradients, because it clips their norm, only the sums over
each gradient move up.

Source of the idea: PyTorch's "How to save memory by fusing the optimizer step into the backward pass" (its tutorials),
and Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", arXiv:2306.09782.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER, is_gradient
from irongrad.mlir.walk import LOAD, STORE, around, found_in, global_of, owner_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# Operations that slice or reshape a value.
_VIEWS = frozenset({"flow.tensor.reshape", "flow.tensor.slice"})
# The most elements of a value that is computed before a reader needs it.
_SMALL = 1024
_MOVABLE = _VIEWS | {"flow.dispatch", "flow.tensor.empty", "flow.tensor.splat", "flow.tensor.update"}


@dataclass(frozen=True)
class UpdateEarly(ModulePass):
    """Move each update directly after the last of its inputs and the last other reader of the state that it overwrites.

    Before:
        %g1 = flow.dispatch @dw1; %g0 = flow.dispatch @dw0
        %w1 = flow.dispatch @update(%g1); %w0 = flow.dispatch @update(%g0)
    After:
        %g1 = flow.dispatch @dw1; %w1 = flow.dispatch @update(%g1)
        %g0 = flow.dispatch @dw0; %w0 = flow.dispatch @update(%g0)

    Runs while gradients are still held by barriers, by which it recognises them.
    """

    name: ClassVar[str] = "update-early"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        blocks = dict.fromkeys(op.block for op in found_in(module, BARRIER) if is_gradient(op))
        moved = sum(_Listing(block).move() for block in blocks)
        return PassResult(moved > 0, {"moved": moved})


class _Listing:
    """The operations of a block in their original order, and the moves so far."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self._operations = [op.operation for op in block]
        self._first = next(i for i, op in enumerate(self._operations) if is_gradient(op))
        # By value: the index of the operation after which it exists.
        self._places = {value: i for i, op in enumerate(self._operations) for value in op.results}
        # By index: the last operation that moved there.
        self._moved: dict[int, Any] = {}
        self._count = 0
        # By global: the operations that load it.
        self._loads: dict[str, list[Any]] = defaultdict(list)
        for operation in self._operations:
            if operation.name == LOAD:
                self._loads[global_of(operation)].append(operation)

    def move(self) -> int:
        """Move operations that depend on gradients; return the number of moved operations."""
        gradients: set[Any] = set()
        for operation in self._operations[self._first :]:
            if is_gradient(operation) or not gradients.isdisjoint(operation.operands):
                gradients.update(operation.results)
                self._move_up(operation, gradients)
        return self._count

    def _move_up(self, operation: Any, gradients: set[Any]) -> None:
        """Move an operation, and its small operands that depend on no gradient, up as far as possible."""
        if operation.name not in _MOVABLE and not is_gradient(operation):
            return
        for value in operation.operands:
            if self._places.get(value, 0) >= self._first and value not in gradients and _is_small(owner_of(value)):
                self._move_up(owner_of(value), gradients)
        needed = [self._places.get(value, 0) for value in operation.operands]
        place = max([0, *needed, *map(self._place_of, self._other_readers(operation))])
        if place < self._first:
            operation.move_after(self._moved.get(place, self._operations[place]))
            self._moved[place] = operation
            self._count += 1
            self._places.update(dict.fromkeys(operation.results, place))

    def _other_readers(self, operation: Any) -> Iterator[Any]:
        """The other readers of the state that results of `operation` overwrite."""
        replaced = {global_of(store) for result in operation.results for store in _stores(result)}
        loads = (load for name in replaced for load in self._loads.get(name, ()))
        users = (user for load in loads for user in self._users(load.results[0]))
        return (user for user in users if user != operation and user.name != STORE)

    def _users(self, value: Any) -> Iterator[Any]:
        """The operations of the block that read a value, directly, through views, or in a nested region."""
        for use in value.uses:
            user = use.owner.operation
            own = next(op for op in (user, *around(user.block)) if op.block == self._block)
            if own.name in _VIEWS:
                yield from self._users(own.results[0])
            else:
                yield own

    def _place_of(self, operation: Any) -> int:
        results = list(operation.results)
        return self._places[results[0]] if results else len(self._operations)


def _is_small(operation: Any) -> bool:
    """Whether the results of an operation may exist early, because they take little memory or none."""
    if operation.name not in _MOVABLE:
        return False
    kinds = [ir.RankedTensorType(result.type) for result in operation.results]
    return operation.name in _VIEWS or all(kind.has_static_shape and math.prod(kind.shape) <= _SMALL for kind in kinds)


def _stores(value: Any) -> Iterator[Any]:
    """The operations that store a value, directly or through views."""
    for use in value.uses:
        user = use.owner.operation
        if user.name == STORE:
            yield user
        elif user.name in _VIEWS:
            yield from _stores(user.results[0])


PASS = UpdateEarly
