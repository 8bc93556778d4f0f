"""Scatters of any size whose indices the step computes: the gradient of a nearest upsampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.passes.module.keep_indices_apart import KeepIndicesApart
from irongrad.runtime.errors import ToolchainError


class _Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.conv(x), scale_factor=2)


def _loss(output: Tensor) -> Tensor:
    return (output.square() * torch.arange(output.shape[2])[:, None]).mean()


def _step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = _Upsampled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, _loss, optimizer, {"x": torch.randn(2, 2, 6, 4)}, dynamic={"x": {2: "H"}})


def test_upsampled_images_train_at_every_size(tmp_path: Path) -> None:
    session = ig.compile(_step(), tmp_path, entry_points=["train_step"]).load()
    step, numbers = _step(), torch.Generator().manual_seed(1)
    for height in (6, 1, 3, 20):
        x = torch.randn(2, 2, height, 4, generator=numbers)
        step.optimizer.zero_grad()
        loss = step.loss(step.model(x))
        loss.backward()
        step.optimizer.step()
        np.testing.assert_allclose(session.train_step(x=x.numpy()), loss.item(), rtol=1e-5)
    for name, parameter in step.model.named_parameters():
        np.testing.assert_allclose(session.state()[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_iree_still_holds_all_indices_of_a_scatter_on_the_stack(
    tmp_path: Path, without: Callable[[type], None]
) -> None:
    """When this fails, the pass is no longer needed."""
    without(KeepIndicesApart)
    with pytest.raises(ToolchainError, match="no unbounded stack allocations"):
        ig.compile(_step(), tmp_path, entry_points=["train_step"])
