"""Products with one size that is known at run time alone, by kernels of ours, beside eager PyTorch in float64."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.passes.module.matmul_kernels import MatmulKernels
from tests.fixtures.compiled_steps import AroundPass
from tests.fixtures.processors import needs_x86

AVX2_TARGET = "llvm-cpu:cpu=x86-64-v3"


class _Layers(nn.Module):
    """Rows of any number, with a bias and without; the gradients of the weights add over them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(48, 96), nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.into(x).tanh())


class _Long(nn.Module):
    """Rows with so many summands that a kernel adds them in several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(2048, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x)


class _Heads(nn.Module):
    """A batch of any number of products, whose right operands are the batch's own, transposed and not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(48, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (x * self.scale) @ x.mT
        return scores.softmax(-1) @ x


class _Experts(nn.Module):
    """A batch of products of any number of rows each, and their weighted sum: rows are no outermost dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 8)
        self.into, self.back = (nn.Parameter(torch.randn(8, 64, 64) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("td,edh->eth", x, self.into).tanh()
        made = torch.einsum("eth,ehd->etd", hidden, self.back)
        return torch.einsum("etd,te->td", made, self.router(x).softmax(-1))


CASES: Mapping[str, tuple[type[nn.Module], tuple[int, ...], set[str]]] = {
    "rows and summands": (_Layers, (48,), {"1xDx96x48", "1xDx64x96", "1xDx96x64", "1x64x96xD", "1x96x48xD"}),
    "blocks of summands": (_Long, (2048,), {"1xDx48x2048", "1x48x2048xD"}),
    "experts": (_Experts, (64,), {"1xDx512x64", "8xDx64x64", "8x64x64xD"}),
    "batches": (_Heads, (48, 32), {"Dx48x48x32", "Dx48x32x48"}),
}


@pytest.mark.thinned(2)
@needs_x86
@pytest.mark.parametrize("target", ["llvm-cpu", AVX2_TARGET])
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_any_size_trains_as_eager_does(
    case: str, target: str, around_pass: AroundPass, tmp_path: Path
) -> None:
    kind, shape, kernels = CASES[case]
    seen = around_pass(MatmulKernels)
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model).double()
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin))
    inputs = {"x": torch.randn(64, *shape), "y": torch.randn(64, 1)}
    dynamic = {"x": {0: "B"}, "y": {0: "B"}}

    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (made.flatten(1).mean(1, keepdim=True) - y).square().mean() + made.square().mean()

    step = ig.TrainStep(model, loss, optimizer, inputs, dynamic=dynamic)
    session = ig.compile(step, tmp_path, target=target, entry_points=["train_step"], cache=False).load()
    found = set(re.findall(r"product_\d+_([\dDx]+)", seen[1].decode(errors="replace")))
    assert found >= kernels
    for rows in (1, 2, 5, 6, 7, 64, 257, 600):
        x, y = torch.randn(rows, *shape), torch.randn(rows, 1)
        eager.zero_grad()
        wanted = loss(twin(x.double()), y.double())
        wanted.backward()
        eager.step()
        np.testing.assert_allclose(session.train_step(x=x.numpy(), y=y.numpy()), wanted.item(), rtol=2e-5)
    state = session.state()
    for name, parameter in twin.named_parameters():
        np.testing.assert_allclose(state[name], parameter.detach().numpy(), rtol=1e-3, atol=2e-5)


class _Tail(nn.Module):
    """All samples but the first: of one sample, there is no row, and the gradients add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x[1:]).square().sum() + x.sum()


@needs_x86
def test_no_rows_have_gradients_of_zero(around_pass: AroundPass, tmp_path: Path) -> None:
    seen = around_pass(MatmulKernels)
    torch.manual_seed(0)
    model = _Tail()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = ig.TrainStep(model, None, optimizer, {"x": torch.randn(8, 64)}, dynamic={"x": {0: "B"}})
    session = ig.compile(step, tmp_path, entry_points=["train_step"], cache=False).load()
    assert b"1x96x64xD" in seen[1]
    before = session.state()
    for samples in (1, 8, 1):
        session.train_step(x=np.ones((samples, 64), np.float32))
        state = session.state()
        changed = [name for name, _ in model.named_parameters() if not np.array_equal(before[name], state[name])]
        assert changed == (["into.weight", "into.bias"] if samples > 1 else [])
        before = state
