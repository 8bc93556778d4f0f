"""Have loops take as many values as they return, of the same types.

The condition of an `scf.while` may return fewer values than it takes: MLIR drops those that the body does not read.
IREE 3.13.0 then converts the body as if it took what the condition takes ("region branch point has 42 operands, but
region successor needs 46 inputs", compiler/src/iree/compiler/Dialect/Stream/Conversion). A line search is such a loop.
tests/passes/module/test_even_loops.py tells when IREE is fixed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER
from irongrad.mlir.walk import found_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_LOOP = "scf.while"


@dataclass(frozen=True)
class EvenLoops(ModulePass):
    """Return from the condition of a loop what it takes, so that both take the same values.

    Before:
        scf.while (%a = %x, %b = %y) { scf.condition(%go) %a } do { ^bb0(%a): … }
    After:
        scf.while (%a = %x, %b = %y) { scf.condition(%go) %a, %b } do { ^bb0(%a, %b): util.optimization_barrier %b; … }
    """

    name: ClassVar[str] = "even-loops"
    required: ClassVar[str] = "IREE cannot convert loops whose condition drops values"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        uneven = [op for op in found_in(module, _LOOP) if not _is_even(op)]
        for loop in uneven:
            _even(loop)
        return PassResult(bool(uneven), {"loops": len(uneven)})


def _is_even(loop: Any) -> bool:
    return [o.type for o in loop.operands] == [r.type for r in loop.results]


def _even(loop: Any) -> None:
    before, after = (region.blocks[0] for region in loop.regions)
    condition, last = list(before)[-1].operation, list(after)[-1].operation
    go, *returned = condition.operands
    places = _places(list(before.arguments), returned)
    taken, passed = list(loop.operands), list(before.arguments)
    for place in range(len(passed), max(places, default=-1) + 1):  # what the condition makes, and does not take
        kind = returned[places.index(place)].type
        taken.append(_any(kind, loop))
        passed.append(before.add_argument(kind, loop.location))
    for place, value in zip(places, returned, strict=True):
        passed[place] = value
    old = list(after.arguments)
    new = [after.add_argument(value.type, loop.location) for value in passed]
    for place, value in zip(places, old, strict=True):
        value.replace_all_uses_with(new[place])
    yielded = list(last.operands)
    with loop.location, ir.InsertionPoint(loop):
        even = ir.Operation.create(_LOOP, [v.type for v in passed], taken, regions=2)
    with loop.location, ir.InsertionPoint(condition):
        ir.Operation.create(condition.name, [], [go, *passed])
    with loop.location, ir.InsertionPoint(last):
        for place in sorted(set(range(len(passed))) - set(places)):  # or IREE drops it again
            ir.Operation.create(BARRIER, [new[place].type], [new[place]])
        ir.Operation.create(last.name, [], [*yielded, *new[len(yielded) :]])
    condition.erase()
    last.erase()
    for _ in old:
        after.erase_argument(0)
    for block, region in zip((before, after), even.regions, strict=True):
        block.append_to(region)
    for place, value in zip(places, loop.results, strict=True):
        value.replace_all_uses_with(even.results[place])
    loop.erase()


def _places(taken: Sequence[Any], returned: Sequence[Any]) -> list[int]:
    """Where each value that the condition returns goes: to a value of its type that the condition takes, or behind."""
    found: dict[int, int] = {}
    free = dict(enumerate(taken))
    for same in (operator.eq, _have_one_type):
        for number, value in enumerate(returned):
            place = next((p for p, other in free.items() if number not in found and same(other, value)), None)
            if place is not None:
                found[number] = place
                del free[place]
    rest = [n for n in range(len(returned)) if n not in found]
    found |= {number: len(taken) + i for i, number in enumerate(rest)}
    return [found[number] for number in range(len(returned))]


def _have_one_type(a: Any, b: Any) -> bool:
    return bool(a.type == b.type)


def _any(kind: ir.Type, loop: Any) -> Any:
    """Some value of a type, which nothing reads."""
    with loop.location, ir.InsertionPoint(loop):
        if isinstance(kind, ir.RankedTensorType):
            return ir.Operation.create("flow.tensor.empty", [kind]).result
        is_float = isinstance(kind, ir.F32Type | ir.F64Type | ir.F16Type | ir.BF16Type)
        value = ir.FloatAttr.get(kind, 0) if is_float else ir.IntegerAttr.get(kind, 0)
        return ir.Operation.create("arith.constant", [kind], attributes={"value": value}).result


PASS = EvenLoops
