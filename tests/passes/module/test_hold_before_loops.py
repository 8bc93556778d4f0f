"""Values that are computed before a loop of any size, in a step of bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.passes.module.hold_before_loops import HoldBeforeLoops
from irongrad.passes.module.matmul_kernels.loops import LoopKernels
from irongrad.runtime.errors import ToolchainError


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.linear = nn.LSTM(6, 11, batch_first=True), nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0])


def _batch(rows: int, steps: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(rows)
    return {n: torch.randn(rows, steps, size, generator=numbers) for n, size in {"x": 6, "y": 5}.items()}


def _step() -> ig.TrainStep:
    model = _Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dynamic = {name: {0: "B", 1: "T"} for name in ("x", "y")}
    return ig.TrainStep(model, nn.MSELoss(), optimizer, _batch(3, 20), dynamic=dynamic, precision="bf16")


def test_an_lstm_of_any_size_trains_in_bfloat16(tmp_path: Path, without: Callable[[type], None]) -> None:
    """By the code of IREE, which a CPU without kernels of ours has."""
    without(LoopKernels)
    session = ig.compile(_step(), tmp_path, entry_points=["train_step"]).load()
    twin = _Recurrent().double()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for rows, steps in ((3, 20), (1, 2), (5, 65), (65, 7)):
        batch = _batch(rows, steps)
        loss = nn.functional.mse_loss(twin(batch["x"].double()), batch["y"].double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made = session.train_step(**{name: tensor.numpy() for name, tensor in batch.items()})
        np.testing.assert_allclose(made, loss.item(), rtol=5e-3)


def test_iree_still_packs_out_of_loops(tmp_path: Path, without: Callable[[type], None]) -> None:
    """When this fails, IREE is fixed, and `hold-before-loops` can go."""
    without(HoldBeforeLoops)
    without(LoopKernels)
    with pytest.raises(ToolchainError):
        ig.compile(_step(), tmp_path, entry_points=["train_step"])
