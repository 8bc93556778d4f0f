"""Operators with a Scalar argument, called with rank-0 float64 tensors, against the same operators with numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule

from irongrad.operators.legalize.scalars import ScalarsToTensors

aten = torch.ops.aten
X, Y, Z = torch.randn(4, 4), torch.rand(4, 4) + 0.5, torch.randn(4, 4)


def run(target: Callable[..., object], *args: object, **kwargs: object) -> torch.Tensor:
    """Interpret one call in which every float is an input of the graph."""
    graph = Graph()
    inputs: list[object] = []

    def node(value: object) -> object:
        if not isinstance(value, (float, torch.Tensor)):
            return value
        inputs.append(torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value)
        return graph.placeholder(f"a{len(inputs)}")

    new_args = tuple(node(a) for a in args)
    call = graph.call_function(target, new_args, {k: node(v) for k, v in kwargs.items()})
    call.meta["val"] = target(*args, **kwargs)
    graph.output(call)
    return ScalarsToTensors(GraphModule(torch.nn.Module(), graph)).run(*inputs)


CASES = {
    "add": (aten.add.Tensor, (X, Y), {"alpha": 0.3}),
    "sub": (aten.sub.Tensor, (X, Y), {"alpha": 0.3}),
    "rsub": (aten.rsub.Scalar, (X, 0.3), {}),
    "mul": (aten.mul.Tensor, (X, 0.3), {}),
    "div": (aten.div.Tensor, (X, 0.3), {}),
    "lerp, small weight": (aten.lerp.Scalar, (X, Y, 0.1), {}),
    "lerp, large weight": (aten.lerp.Scalar, (X, Y, 0.9), {}),
    "addcmul": (aten.addcmul.default, (X, Y, Z), {"value": 0.3}),
    "addcdiv": (aten.addcdiv.default, (X, Z, Y), {"value": -0.3}),
    "addmm": (aten.addmm.default, (X, Y, Z), {"beta": 0.5, "alpha": 2.0}),
    "clamp": (aten.clamp.default, (X, -0.2, 0.3), {}),
    "clamp_min": (aten.clamp_min.default, (X, -0.2), {}),
    "clamp_max": (aten.clamp_max.default, (X, 0.2), {}),
    "pow of a number": (aten.pow.Scalar, (0.9, Y), {}),
    "pow by a number": (aten.pow.Tensor_Scalar, (Y, 1.5), {}),
    "gt": (aten.gt.Scalar, (X, 0.1), {}),
    "full_like": (aten.full_like.default, (X, 0.3), {}),
    "full": (aten.full.default, ([2, 3], 0.3), {"dtype": torch.float32}),
}


@pytest.mark.parametrize(("target", "args", "kwargs"), CASES.values(), ids=CASES.keys())
def test_tensors_as_scalars_give_the_same_results_as_numbers(
    target: Callable[..., torch.Tensor], args: tuple, kwargs: dict
) -> None:
    found, expected = run(target, *args, **kwargs), target(*args, **kwargs)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_arithmetic_on_scalars_is_in_float64() -> None:
    assert run(lambda a, b: 1 - a**b, 0.999, 3.0).item() == 1 - 0.999**3.0


def test_lerp_is_exact_at_both_ends() -> None:
    assert torch.equal(run(aten.lerp.Scalar, X, Y, 0.0), X)
    assert torch.equal(run(aten.lerp.Scalar, X, Y, 1.0), Y)


@pytest.mark.parametrize(("a", "b"), [(0.1, 0.2), (0.2, 0.1), (0.1, 0.1)])
def test_minima_and_maxima_of_scalars_match_python(a: float, b: float) -> None:
    assert run(torch.sym_min, a, b).item() == min(a, b)
    assert run(torch.sym_max, a, b).item() == max(a, b)
    assert run(torch.sym_max, a, 1).item() == 1.0


ROUNDED = {name: case for name, case in CASES.items() if name not in ("pow of a number", "gt", "full")}


@pytest.mark.parametrize(("target", "args", "kwargs"), ROUNDED.values(), ids=ROUNDED.keys())
def test_half_precision_rounds_its_result_alone(target: Callable[..., torch.Tensor], args: tuple, kwargs: dict) -> None:
    """As eager does: a factor of 0.999 would be 1 in bfloat16."""
    halves = [a.bfloat16() if isinstance(a, torch.Tensor) else a for a in args]
    exact = target(*(a.double() if isinstance(a, torch.Tensor) else a for a in halves), **kwargs)
    found = run(target, *halves, **kwargs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=0.505 * torch.finfo(torch.bfloat16).eps, atol=1e-7)
