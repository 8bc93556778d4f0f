"""The pass multi-tensor: one update for many small tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from irongrad.mlir.walk import found_in, parsed
from irongrad.passes import run_passes
from irongrad.passes.graph.common_subexpressions import CommonSubexpressions
from irongrad.passes.graph.multi_tensor import MultiTensor
from irongrad.pipeline.assemble.interface import describe_function
from irongrad.pipeline.backend import portable_function
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation
from irongrad.targets import parse_target

SHAPES = [(16,), (3, 5), (2, 3, 4), (1,), (32,)]


def examples(shapes, state=3):
    """A learning rate, and for every shape a parameter, a gradient, and further state."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(s, generator=generator) for s in shapes for _ in range(state)]
    return torch.tensor(0.1, dtype=torch.float64), *tensors


def momentum(rate, *tensors):
    """SGD with momentum: new parameters and new momenta."""
    results = []
    for p, g, m in zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True):
        new = (m * 0.9 + g).clone()
        results += [p - new * rate, new]
    return results


@pytest.fixture(name="update")
def update_fixture(apply):
    return partial(apply, function="update")


def test_small_tensors_are_updated_as_one(update):
    done = update(MultiTensor(), momentum, *examples(SHAPES))
    assert done.stats == {"tensors": 5, "updates": 1}
    counts = done.operators
    assert {o: counts[f"aten.{o}.Tensor"] for o in ("mul", "add", "sub")} == {"mul": 2, "add": 1, "sub": 1}
    assert counts["aten.cat.default"] == 3
    assert counts["aten.slice.Tensor"] == 10


def test_every_tensor_starts_at_an_aligned_offset(update):
    done = update(MultiTensor(), momentum, *examples(SHAPES))
    starts = {n.args[2] for n in done.after.graph.nodes if n.target is torch.ops.aten.slice.Tensor}
    assert starts == {0, 16, 48, 64, 96}  # tensors that need no gap after them come first


def test_large_tensors_stay(update):
    done = update(MultiTensor(limit=20), momentum, *examples(SHAPES))
    assert done.stats == {"tensors": 3, "updates": 1}


def test_other_functions_stay(apply):
    assert not apply(MultiTensor(), momentum, *examples(SHAPES), function="joint").changed


def test_one_tensor_stays(update):
    assert not update(MultiTensor(), momentum, *examples([(4,), (1000, 1000)])).changed


def test_different_programs_stay_apart(update):
    def two(rate, *tensors):
        first, second = momentum(rate, *tensors[:6]), momentum(rate * 2, *tensors[6:])
        return [*first, *second]

    done = update(MultiTensor(), two, *examples([(4,), (5,), (6,), (7,)]))
    assert done.stats == {"tensors": 4, "updates": 2}


def test_tensors_of_different_dtypes_stay_apart(update):
    rate, *tensors = examples([(4,), (5,), (6,), (7,)])
    mixed = [t.double() if i >= 6 else t for i, t in enumerate(tensors)]
    assert update(MultiTensor(), momentum, rate, *mixed).stats == {"tensors": 4, "updates": 2}


def test_an_update_that_is_not_elementwise_stays(update):
    def normalised(rate, *tensors):
        return [p - g / g.sum() * rate for p, g in zip(tensors[::2], tensors[1::2], strict=True)]

    assert not update(MultiTensor(), normalised, *examples(SHAPES, 2)).changed


def test_one_update_can_need_the_outcome_of_another(update):
    def chained(rate, p, g, q, h):
        first = p - g * rate
        return [first, q - h * first.sum().to(torch.float64)]

    assert not update(MultiTensor(), chained, *examples([(4,), (5,)], 2)).changed


def adam(rate, *tensors):
    """AdamW's arithmetic, with the bias corrections left out."""
    results = []
    for p, g, m, v in zip(*(tensors[i::4] for i in range(4)), strict=True):
        m1 = torch.where(rate < 1, m + (g - m) * 0.1, g)
        v1 = v * 0.99 + g * g * 0.01
        results += [p * (1 - rate * 0.01) - m1 / (v1.sqrt() + 1e-8) * rate, m1, v1]
    return results


def test_an_update_of_200_small_tensors_has_a_fifth_of_the_dispatches(step_of, tmp_path):
    """The goal of this pass."""
    shapes = [(16,), (32,), (10,)]
    step = step_of(adam, *examples([shapes[i % 3] for i in range(200)], 4), function="update")
    target, source, counts = parse_target("llvm-cpu"), tmp_path / "step.mlirbc", []
    for passes in ([CommonSubexpressions()], [CommonSubexpressions(), MultiTensor()]):
        graph = run_passes(step, passes)
        graph = replace(graph, functions={"call": graph.functions["update"]})
        module = portable_function(graph, describe_function(graph), tmp_path)
        source.write_bytes(module.bytecode)
        with parsed(Compilation.of(source, target, [*COMMON_FLAGS, *target.flags]).to_flow()) as flow:
            counts.append(len(found_in(flow, "flow.dispatch")))
    before, after = counts
    assert before >= 200
    assert 5 * after <= before
