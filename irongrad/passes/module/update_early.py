"""Updates that run as soon as what they need is there, so that a gradient takes memory for a short time.

A step's update is written behind its backward, and IREE 3.13.0 runs kernels in the order in which they are listed, as
late as it can: every gradient stays until the last has been computed. Here what an update computes is listed right
behind the last that it needs, of gradients and of what else reads the state that it replaces, which may then be written
where it lies (`passes/module/state_in_place.py`). Where all gradients are needed, as their norm is to be clipped, what
adds up is listed early and the rest stays.

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

# What is a part of a value, or gives it another shape.
_VIEWS = frozenset({"flow.tensor.reshape", "flow.tensor.slice"})
# How many elements may be there early although nothing needs them yet.
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
    """The operations of a block, in the order that they had, and how far up some of them have been moved."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self._operations = [op.operation for op in block]
        self._first = next(i for i, op in enumerate(self._operations) if is_gradient(op))
        # By value, behind which operation it is there.
        self._places = {value: i for i, op in enumerate(self._operations) for value in op.results}
        # By such a place, the last that was moved there.
        self._moved: dict[int, Any] = {}
        self._count = 0
        # By global, what loads it.
        self._loads: dict[str, list[Any]] = defaultdict(list)
        for operation in self._operations:
            if operation.name == LOAD:
                self._loads[global_of(operation)].append(operation)

    def move(self) -> int:
        """Move what depends on gradients; how many operations that were."""
        gradients: set[Any] = set()
        for operation in self._operations[self._first :]:
            if is_gradient(operation) or not gradients.isdisjoint(operation.operands):
                gradients.update(operation.results)
                self._move_up(operation, gradients)
        return self._count

    def _move_up(self, operation: Any, gradients: set[Any]) -> None:
        """Move an operation, and what it needs besides gradients, as far up as they can be."""
        if operation.name not in _MOVABLE and not is_gradient(operation):
            return
        for value in operation.operands:
            if self._places.get(value, 0) >= self._first and value not in gradients and _is_small(owner_of(value)):
                self._move_up(owner_of(value), gradients)
        needed = [self._places.get(value, 0) for value in operation.operands]
        place = max([0, *needed, *map(self._place_of, self._reading_replaced(operation))])
        if place < self._first:
            operation.move_after(self._moved.get(place, self._operations[place]))
            self._moved[place] = operation
            self._count += 1
            self._places.update(dict.fromkeys(operation.results, place))

    def _reading_replaced(self, operation: Any) -> Iterator[Any]:
        """What else reads the state that results of `operation` replace."""
        replaced = {global_of(store) for result in operation.results for store in _stores(result)}
        loads = (load for name in replaced for load in self._loads.get(name, ()))
        users = (user for load in loads for user in self._users(load.results[0]))
        return (user for user in users if user != operation and user.name != STORE)

    def _users(self, value: Any) -> Iterator[Any]:
        """The operations of the block that a value is read by or in, as it is or through views."""
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
    """Whether what an operation makes may be there early: it takes no memory, or hardly any."""
    if operation.name not in _MOVABLE:
        return False
    kinds = [ir.RankedTensorType(result.type) for result in operation.results]
    return operation.name in _VIEWS or all(kind.has_static_shape and math.prod(kind.shape) <= _SMALL for kind in kinds)


def _stores(value: Any) -> Iterator[Any]:
    """The operations that store a value, as it is or in another shape."""
    for use in value.uses:
        user = use.owner.operation
        if user.name == STORE:
            yield user
        elif user.name in _VIEWS:
            yield from _stores(user.results[0])


PASS = UpdateEarly
