"""The gain of each pass, in nodes, kernels, operations or bytes: a pass without a gain has to go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.fx import Node
from torch.nn import functional as F

from irongrad.graph.step_graph import StepGraph
from irongrad.memory_model.fusion import kernels
from irongrad.memory_model.liveness import usage
from irongrad.memory_model.node_costs import flops
from irongrad.passes import DEFAULT_LEVEL, Pass, parse_passes, passes_at, registered, run_passes, without
from irongrad.pipeline.driver import step_graph
from irongrad.quantisation.quantize import quantize
from irongrad.step.train_step import TrainStep

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def calls(step: StepGraph) -> Iterator[Node]:
    for function in step.functions.values():
        yield from (n for n in function.graph.graph.nodes if n.op == "call_function")


def nodes(step: StepGraph) -> int:
    return sum(len(f.graph.graph.nodes) for f in step.functions.values())


def launches(step: StepGraph) -> int:
    """Kernels, by the model of IREE's fusion."""
    return sum(len(kernels(f.graph.graph, packed=True).members) for f in step.functions.values())


def operations(step: StepGraph) -> int:
    """Floating point operations of products and convolutions."""
    return sum(map(flops, calls(step)))


def transposed(step: StepGraph) -> int:
    """Elements of transposed tensors."""
    return sum(n.meta["val"].numel() for n in calls(step) if n.target is torch.ops.aten.permute.default)


def memory(step: StepGraph) -> int:
    """Bytes of transients, by the model of IREE's memory."""
    return usage(step.functions["joint"].graph.graph).total


def wide_operands(step: StepGraph) -> int:
    """Operands of products that are float32 matrices, other than widened half-precision ones."""
    cast = torch.ops.prims.convert_element_type.default
    operands = [o for n in calls(step) if n.target is torch.ops.aten.bmm.default for o in n.all_input_nodes]
    return sum(o.target is not cast for o in operands)


@pytest.fixture(scope="module")
def decoder() -> StepGraph:
    """Forward, backward and update of a model that computes its masks and angles in every layer."""
    sys.path.insert(0, str(BENCHMARKS))
    import decoder

    whole = step_graph(decoder.make_step(batch=2, length=8, width=16))
    return replace(whole, functions={name: whole.functions[name] for name in ("joint", "update")})


def with_gradient(fn: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def both(*tensors):
        value, backward = torch.func.vjp(fn, *tensors)
        return value, *backward(torch.ones_like(value))

    return both


@pytest.fixture(scope="module")
def images(step_of) -> StepGraph:
    """A 3x3 convolution."""
    fn = with_gradient(lambda x, w: F.conv2d(x, w, padding=1))
    return step_of(fn, torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3))


@pytest.fixture(scope="module")
def bottleneck(step_of) -> StepGraph:
    """1x1 convolutions, with elementwise functions between them."""

    def fn(x, *weights):
        for weight in weights:
            x = F.conv2d(x, weight[:, :, None, None]).relu()
        return x.mean((2, 3))

    return step_of(with_gradient(fn), torch.randn(4, 64, 8, 8), *torch.randn(3, 64, 64))


@pytest.fixture(scope="module")
def pooled(step_of) -> StepGraph:
    """Maximum pooling, whose masks are computed from positions."""
    return step_of(with_gradient(lambda x: F.max_pool2d(x, 3, 2, 1)), torch.randn(2, 4, 8, 8))


@pytest.fixture(scope="module")
def attention(step_of) -> StepGraph:
    """The scores of attention in bfloat16."""

    def scores(q, k):
        return torch.bmm(q.float() * 0.3, k.float().mT * 0.3)

    return step_of(scores, *(torch.randn(2, 8, 16).bfloat16() for _ in range(2)))


@pytest.fixture(scope="module")
def cell(step_of) -> StepGraph:
    """The concatenated gates of a recurrent cell, and their reader."""

    def gates(x, y):
        return torch.cat([x.sigmoid(), y.tanh(), x * y, x - y], 1).exp()

    return step_of(gates, torch.randn(8, 16), torch.randn(8, 16))


@pytest.fixture(scope="module")
def sequence() -> StepGraph:
    """Causal attention over a long sequence, with its backward."""
    layer = torch.nn.Linear(32, 96)

    def loss(output, y):
        q, k, v = output.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.mse_loss(F.scaled_dot_product_attention(q, k, v, is_causal=True), y)

    inputs = {"x": torch.randn(1, 1024, 32), "y": torch.randn(1, 2, 1024, 16)}
    return step_graph(TrainStep(layer, loss, torch.optim.SGD(layer.parameters(), lr=0.1), inputs))


@pytest.fixture(scope="module")
def characters(step_of) -> StepGraph:
    """A layer after an embedding, with fewer characters in the table than in the text."""
    index = torch.arange(64) % 8

    def fn(table, weight):
        return F.linear(F.embedding(index, table), weight)

    return step_of(with_gradient(fn), torch.randn(8, 64), torch.randn(64, 64))


@pytest.fixture(scope="module")
def quantised() -> StepGraph:
    """Training of the biases between layers whose weights are quantised."""
    layers = (layer for _ in range(4) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh()))
    model = quantize(torch.nn.Sequential(*layers), "int4")
    inputs = {"x": torch.randn(4, 128), "y": torch.randn(4, 128)}
    return step_graph(TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs))


@dataclass(frozen=True)
class Gain:
    """The gain of a pass on a step.

    Attributes:
        step: the fixture of the step.
        measure: the amount that the pass reduces.
        most: the largest allowed fraction of the amount without the pass.
        spelled: the pass and its options, if they differ from the name.
        target: the target of the passes.
    """

    step: str
    measure: Callable[[StepGraph], int]
    most: float
    spelled: str = ""
    target: str = "llvm-cpu"


GAINS = {
    "dce": Gain("decoder", nodes, 0.9),
    "fold": Gain("pooled", nodes, 0.7),
    "simplify": Gain("decoder", nodes, 0.6),
    "cse": Gain("decoder", nodes, 0.6),
    "convolutions": Gain("images", operations, 0.5),
    "layout": Gain("bottleneck", transposed, 0.5),
    "table-products": Gain("characters", operations, 0.2),
    "row-blocks": Gain("sequence", memory, 0.6),
    "multi-tensor": Gain("decoder", launches, 0.8),
    "gradient-norm": Gain("decoder", launches, 0.95),
    "half-products": Gain("attention", wide_operands, 0.0, target="cuda"),
    "recompute-dequantised": Gain("quantised", memory, 0.6),
    "interleave": Gain("cell", launches, 0.5),
    "rematerialise": Gain("decoder", memory, 0.75, "rematerialise{max_memory=75%}"),
}


@pytest.fixture(name="optimised", scope="module")
def optimised_fixture(request) -> Callable[[str, tuple[Pass, ...], str], StepGraph]:
    """The step of a fixture after passes, for a target."""
    return cache(lambda step, passes, target: run_passes(request.getfixturevalue(step), passes, [target]))


def test_every_pass_has_a_gain():
    assert GAINS.keys() == registered().keys()


@pytest.mark.parametrize("name", GAINS)
def test_gain(name, optimised):
    """Compare the default pipeline with and without the pass."""
    gain = GAINS[name]
    standard = passes_at(DEFAULT_LEVEL)
    rest = without(standard, [name])
    whole = standard if rest != standard else (*standard, *parse_passes(gain.spelled or name))
    before, after = (gain.measure(optimised(gain.step, p, gain.target)) for p in (rest, whole))
    assert before > 0
    assert after <= gain.most * before
