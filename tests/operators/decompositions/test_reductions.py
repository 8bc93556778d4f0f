"""Compiled sums of many elements are as close to float64 as those of eager float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.operators.decompositions import decomposition_table
from irongrad.operators.decompositions.reductions import LONGEST_CHAIN
from irongrad.operators.legalize import retrace
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import key_of
from irongrad.runtime.tolerance import FACTOR

MILLIONS = 2_000_000
PRIME = 1_000_003


class Reduced(nn.Module):
    """A reduction of the inputs times one parameter, so the parameter's gradient is a long sum too."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(x * self.scale)


def positive(*shape: int) -> torch.Tensor:
    """Positive numbers: their sums do not cancel, so a relative error counts roundings."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.1


REDUCTIONS = {
    "mean of all": (lambda x: (x * x).mean(), positive(MILLIONS)),
    "sum of a prime number": (lambda x: x.sum(), positive(PRIME)),
    "several dimensions": (lambda x: x.sum((0, 2, 3)).square().mean(), positive(64, 8, 56, 56)),
    "first dimension": (lambda x: x.mean(0).square().sum(), positive(MILLIONS // 8, 8)),
    "dimensions that do not divide": (lambda x: x.sum((0, -1)).log().sum(), positive(997, 3, 1009)),
    "variance": (lambda x: (x + 100.0).var((0, 2)).sum(), positive(4, 3, PRIME // 3)),
    "standard deviation": (lambda x: torch.std_mean(x + 100.0, correction=0)[0], positive(MILLIONS)),
    "norm": (lambda x: torch.linalg.vector_norm(x), positive(MILLIONS)),
    "softmax": (lambda x: (x.softmax(-1) * torch.arange(2.0).repeat(PRIME // 20)).sum(), positive(3, PRIME // 20 * 2)),
    "log_softmax": (lambda x: x.log_softmax(-1)[:, 7].sum(), positive(3, PRIME // 10)),
    "product of matrices": (lambda x: (x @ x.T).sum(), positive(16, 65536)),
}


def compiled(step: ig.TrainStep, output: Path) -> dict[str, tuple[float, float]]:
    """For each value of `train_step`, the error against float64 and the error that the number contract allows."""
    artifact = ig.compile(step, output, entry_points=("train_step",))
    comparisons = artifact.reports["llvm-cpu"].comparisons
    return {c.key: (c.error, c.allowed) for c in comparisons}


# test_accuracy.py reduces 100 000 elements in these ways in the default run.
SLOW = ("standard deviation", "norm", "log_softmax")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in REDUCTIONS])
def test_long_sums_are_as_accurate_as_eager(name: str, tmp_path: Path) -> None:
    reduce, x = REDUCTIONS[name]
    model = Reduced(reduce)
    step = ig.TrainStep(model, lambda out: out, torch.optim.SGD(model.parameters(), lr=1e-9), {"x": x})
    errors = compiled(step, tmp_path / "artifact")
    loss = abs(float(reduce(x.double() * 0.7)))
    assert all(error <= allowed for error, allowed in errors.values())
    assert errors[key_of("loss", 0)][0] <= 2e-6 * loss


def test_sums_of_hundreds_are_as_accurate_as_eager() -> None:
    """Compares root mean square errors: the bound on the largest error would let chains of hundreds pass."""
    x = positive(512, 768)

    def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(1), x.reshape(4, 128, 768).sum((0, 2)), x.T.sum(0), x.square().mean(1), x.var(1)

    found = ig.compile_function(sums, (x,))(x.numpy())
    for value, eager, exact in zip(found, sums(x), sums(x.double()), strict=True):
        error = (torch.from_numpy(value) - exact).square().mean().sqrt()
        assert error <= FACTOR * (eager - exact).square().mean().sqrt()


def test_batch_norm_over_a_large_batch_is_as_accurate_as_eager(tmp_path: Path) -> None:
    """Statistics, running statistics and the backward's sums; with this large mean, E[x^2] - E[x]^2 would cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 48 * 48, 1))
    x = 300.0 + torch.randn(64, 4, 48, 48)
    step = ig.TrainStep(model, lambda out: out.square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), {"x": x})
    errors = compiled(step, tmp_path / "artifact")
    assert errors[key_of("state", 1, "0.running_mean")][0] <= 30.0 * 1e-6


def test_weight_gradients_over_a_large_batch_are_as_accurate_as_eager(tmp_path: Path) -> None:
    """A linear layer's weight gradient is a product over all 8191 rows, and its bias gradient is a sum over them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
    x, y = torch.randn(8191, 24), torch.randn(8191, 8)
    step = ig.TrainStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), {"x": x, "y": y})
    compiled(step, tmp_path / "artifact")


def test_the_contract_refuses_one_long_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sums in levels the same mean fails verification, so the tests above can fail."""
    table = {
        op: f
        for op, f in decomposition_table().items()
        if f.__module__ != "irongrad.operators.decompositions.reductions"
    }
    monkeypatch.setattr(retrace, "decomposition_table", lambda: table)
    reduce, x = REDUCTIONS["mean of all"]
    model = Reduced(reduce)
    step = ig.TrainStep(model, lambda out: out, torch.optim.SGD(model.parameters(), lr=1e-9), {"x": x})
    with pytest.raises(VerificationError):
        compiled(step, tmp_path / "artifact")


def test_no_sum_of_the_graph_is_longer_than_a_chain() -> None:
    def sums(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(), x.mean((0, 2)), x.var(0), torch.linalg.vector_norm(x, dim=2), x.sum(2, keepdim=True)]

    graph = retrace.retrace(sums, [torch.empty(5003, 3, 2048)])
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.sum.dim_IntList:
            before, after = node.args[0].meta["val"].numel(), node.meta["val"].numel()
            assert before <= LONGEST_CHAIN * after


def test_short_sums_stay_one_operator() -> None:
    graph = retrace.retrace(lambda x: [x.sum(0), x.mean(0)], [torch.empty(LONGEST_CHAIN, 4)])
    names = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert names == [torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.dim]


@pytest.mark.parametrize(
    "sizes",
    [{}, {"dynamic": {"x": {0: "B", 1: "T"}}}, {"dynamic": {"x": {0: "B", 1: "T"}}, "buckets": {"B": [8], "T": [6]}}],
)
def test_equal_elements_deviate_by_nothing_and_pass_no_gradient_on(
    sizes: dict[str, Any], tmp_path: Path, trains_as_eager: Callable[..., None]
) -> None:
    """The mean of seven times 0.1 rounds in float32; its root would be 3e-8, with gradients of about 0.15."""
    model = Reduced(lambda x: x.std(0).sum() + torch.std_mean(x, 1)[0].sum())
    varied = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    equal = torch.full((7, 5), 0.1)
    one = torch.ones(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, torch.mul, optimizer, {"x": varied, "y": one}, **sizes)
    session = ig.compile(step, tmp_path / "artifact").load()
    batches = [{"x": x, "y": one} for x in (varied, equal, 3 * equal)]
    trains_as_eager(session, step, batches, rtol=1e-5, state=(1e-6, 1e-6))
