"""If, Loop and Scan.

Decisions that are known without data are taken here: which branch runs, and how often a loop iterates. Decisions that
depend on data become PyTorch's `cond` and `while_loop`, and a loop of many iterations becomes its `scan`. All three are
compiled to structured control flow. A loop whose end depends on data has no gradient, because the values of its
iterations cannot be kept.

In eager mode they run in Python, where autograd follows every operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from irongrad.graph import eager_control_flow as python
from irongrad.onnx.registry import Call, Region, Static, Value, operator, tensor, with_inner
from irongrad.operators.decompositions.recurrent import LONGEST_UNROLLED

# The most iterations that are unrolled if a loop computes its own trip count.
MOST_COUNTED = 1000


class _Body:
    """A region of a node, as a function.

    Attributes:
        region: the region.
        outer: the tensors that the region reads from the graphs around it, by name.
    """

    def __init__(self, call: Call, name: str) -> None:
        self._call = call
        self.region: Region = call.get(name)
        self.outer = {n: v for n in self.region.outside if isinstance(v := call.values[n], Tensor)}

    def known(self, name: str) -> Static | None:
        """Return a value from outside if it is known without data, else None."""
        value = self._call.values[name] if name in self.region.outside else None
        return None if isinstance(value, Tensor) else value

    def __call__(self, given: Sequence[Value], outer: Sequence[Tensor] | None = None) -> list[Value]:
        """Return the region's results for these inputs, with the tensors `outer` in place of `self.outer`."""
        values = {n: self._call.values[n] for n in self.region.outside}
        if outer is not None:
            self._check_structured(values.values())
            values |= dict(zip(self.outer, outer, strict=True))
        values |= dict(zip(self.region.inputs, given, strict=True))
        for node in self.region.nodes:
            self._call.compute(node, values)
        return [values[n] for n in self.region.outputs]

    def _check_structured(self, values: Iterable[Value]) -> None:
        """Refuse operations that a region cannot do if it is unknown how often it runs."""
        _tensors(self._call, [v for v in values if isinstance(v, list)])
        for node in with_inner(self.region.nodes):
            if self._call.training and node.operator == "BatchNormalization":
                raise node.unsupported(
                    f"collects statistics inside of {self._call.node.name}, where data or a loop decides how often, "
                    "which is not supported"
                )


def _operators() -> Any:
    """Return PyTorch's control flow operators during tracing, and the Python versions otherwise."""
    traces = torch.compiler.is_compiling() or get_proxy_mode() is not None
    return torch.ops.higher_order if traces else python


@operator("If")
def if_(call: Call, condition: Value) -> list[Value]:
    """Run one of two branches."""
    if not isinstance(condition, Tensor):
        return _Body(call, "then_branch" if condition.item() else "else_branch")([])
    branches = [_Body(call, name) for name in ("then_branch", "else_branch")]
    outer = branches[0].outer | branches[1].outer

    def function(body: _Body) -> Callable[..., tuple[Tensor, ...]]:
        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(outer, tensors, strict=True))
            return tuple(_tensors(call, body([], [given[n] for n in body.outer])))

        return run

    return list(_operators().cond(condition.reshape(()), *map(function, branches), tuple(outer.values())))


@operator("Scan")
def scan(call: Call, *values: Value) -> list[Tensor]:
    """Carry states along axes of the other inputs, and stack the further results of each step."""
    if call.opset < 9:
        raise call.node.unsupported("is one loop for each row of a batch, which is not supported")
    count = call.get("num_scan_inputs")
    states, sequences = values[:-count], [tensor(v) for v in values[-count:]]
    axes = call.get("scan_input_axes") or [0] * count
    backwards = call.get("scan_input_directions") or [0] * count
    rows = [_along(s, a, b) for s, a, b in zip(sequences, axes, backwards, strict=True)]
    body = _Body(call, "body")
    last, stacks = _iterated(call, body, body, states, rows)
    axes = call.get("scan_output_axes") or [0] * len(stacks)
    backwards = call.get("scan_output_directions") or [0] * len(stacks)
    results = [(s.flip(0) if b else s).movedim(0, a) for s, a, b in zip(stacks, axes, backwards, strict=True)]
    return [*last, *results]


def _along(x: Tensor, axis: int, backwards: int) -> Tensor:
    rows = x.movedim(axis, 0)
    return rows.flip(0) if backwards else rows


def _iterated(
    call: Call,
    body: _Body,
    run: Callable[[Sequence[Value], Sequence[Tensor]], list[Value]],
    states: Sequence[Value],
    rows: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the states after all rows, and the stacked further results of `run`, which runs the body."""
    carried, size = [_state(call, s) for s in states], len(states)

    def step(*tensors: Tensor) -> list[Tensor]:
        given, outer = tensors[: size + len(rows)], tensors[size + len(rows) :]
        results = _tensors(call, run(given, outer))
        _check_kept(call, given[:size], results[:size])
        return results

    length = rows[0].shape[0]
    if length == 0:
        raise call.node.unsupported("runs over an empty sequence, which is not supported")
    short = isinstance(length, int) and length <= LONGEST_UNROLLED
    operators = python if short else _operators()
    results = operators.scan(step, carried, list(rows), tuple(body.outer.values()))
    return list(results[:size]), list(results[size:])


def _tensors(call: Call, values: Sequence[Value]) -> list[Tensor]:
    if any(isinstance(v, list) for v in values):
        raise call.node.unsupported(
            "has a sequence of tensors, and what runs depends on data, or it is in a loop of more than "
            f"{LONGEST_UNROLLED} iterations, which is not supported"
        )
    return [tensor(v) for v in values]


def _state(call: Call, value: Value) -> Tensor:
    """Return an initial state of a loop; float32 becomes float64 if the model was converted to float64."""
    (results,) = _tensors(call, [value])
    return results.double() if call.wide and results.dtype is torch.float32 else results


def _check_kept(call: Call, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    for one, other in zip(before, after, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise call.node.unsupported(
                f"changes what it carries from {one.dtype} {list(one.shape)} to {other.dtype} {list(other.shape)}, "
                "which is not supported in a loop"
            )


@operator("Loop")
def loop(call: Call, trips: Value | None = None, condition: Value | None = None, *initial: Value) -> list[Value]:
    """Iterate `trips` times while a condition holds; either may be left out."""
    body = _Body(call, "body")
    if isinstance(trips, Tensor) or isinstance(condition, Tensor):
        return _while(call, body, trips, condition, initial)
    most = None if trips is None else int(trips.item())
    if condition is not None and not condition.item():
        most = 0
    if most is None or not _always_goes_on(body):
        results = _counted(call, body, initial, most)
        return _while(call, body, trips, condition, initial) if results is None else results
    if most <= LONGEST_UNROLLED:
        results = _counted(call, body, initial, most)
        assert results is not None
        return results
    goes_on = np.array(True)

    def run(given: Sequence[Value], outer: Sequence[Tensor]) -> list[Value]:
        *states, number = given
        return body([number, goes_on, *states], outer)[1:]

    last, stacks = _iterated(call, body, run, initial, [torch.arange(most)])
    return [*last, *stacks]


def _always_goes_on(body: _Body) -> bool:
    """Return whether the condition always holds: the body returns the condition that it gets, or a known True."""
    name = body.region.outputs[0]
    makers = {o: n for n in body.region.nodes for o in n.outputs}
    while name in makers and makers[name].operator == "Identity":
        name = makers[name].inputs[0]
    known = body.known(name)
    return name == body.region.inputs[1] or (known is not None and bool(known.item()))


def _counted(call: Call, body: _Body, initial: Sequence[Value], most: int | None) -> list[Value] | None:
    """Unroll the iterations; return None if data decides which is the last."""
    states, stacked, number = list(initial), list[list[Value]](), 0
    goes_on: Value = np.array(True)
    while goes_on.item() and (most is None or number < most):
        goes_on, *results = body([np.array(number), goes_on, *states])
        if isinstance(goes_on, Tensor):
            return None
        states, number = results[: len(states)], number + 1
        stacked.append(results[len(states) :])
        if number > MOST_COUNTED:
            raise call.node.unsupported(f"makes more than {MOST_COUNTED} iterations, which is not supported")
    if not stacked and len(body.region.outputs) > 1 + len(states):
        raise call.node.unsupported("makes no iteration, so its stacked results have no known shape")
    return [*states, *(_stacked(rows) for rows in zip(*stacked, strict=True))]


def _stacked(rows: Sequence[Value]) -> Value:
    if all(isinstance(r, np.ndarray) for r in rows):
        return np.stack(rows)
    return torch.stack([tensor(r) for r in rows])


def _while(
    call: Call, body: _Body, trips: Value | None, condition: Value | None, initial: Sequence[Value]
) -> list[Value]:
    """Run a loop whose end depends on data; it has no gradient."""
    if len(body.region.outputs) > 1 + len(initial):
        raise call.node.unsupported(
            "stacks a result of every iteration, whose number depends on data, which is not supported"
        )
    most = torch.full((), torch.iinfo(torch.int64).max) if trips is None else tensor(trips).reshape(())
    goes_on = torch.ones((), dtype=torch.bool) if condition is None else tensor(condition).reshape(())

    def holds(number: Tensor, most: Tensor, goes_on: Tensor, *rest: Tensor) -> Tensor:
        return goes_on & (number < most)

    def step(number: Tensor, most: Tensor, goes_on: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, outer = rest[: len(initial)], rest[len(initial) :]
        results = _tensors(call, body([number, goes_on, *states], outer))
        _check_kept(call, states, results[1:])
        return (number + 1, most, results[0].reshape(()), *results[1:])

    carried = (torch.zeros((), dtype=torch.int64), most, goes_on, *(_state(call, v) for v in initial))
    return list(_operators().while_loop(holds, step, carried, tuple(body.outer.values()))[3:])
