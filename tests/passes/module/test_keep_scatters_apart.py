"""Scatters whose indices or updates a step computes: gradients of nearest upsampling and of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.passes.module.keep_scatters_apart import KeepScattersApart
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


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(16, 128), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.embedding(x)).mean(1)


def _embedded() -> ig.TrainStep:
    model = _Embedded()
    inputs = {"x": torch.randint(0, 16, (32, 64)), "y": torch.randint(0, 4, (32,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


def test_an_embedding_trains_in_bfloat16(tmp_path: Path) -> None:
    """A quarter of a million updates are widened from bfloat16, which takes a megabyte."""
    step = _embedded()
    session = ig.compile(step, tmp_path, entry_points=["train_step"], precision="bf16").load()
    x, y = step.inputs.values()
    with torch.autocast("cpu", torch.bfloat16):
        loss = step.loss(step.model(x), y)
    np.testing.assert_allclose(session.train_step(x=x.numpy(), y=y.numpy()), loss.item(), rtol=2e-2)


def test_an_embedding_trains_in_bfloat16_at_every_size(tmp_path: Path, trains_as_eager: Callable[..., None]) -> None:
    step = replace(_embedded(), dynamic={n: {0: "B"} for n in "xy"}, precision="bf16")
    session = ig.compile(step, tmp_path, cache=False, entry_points=["train_step", "reset"]).load()
    batches = [{"x": torch.randint(16, (n, 64)), "y": torch.randint(4, (n,))} for n in (1, 7, 33)]
    trains_as_eager(session, step, batches, rtol=2e-2, state=(2e-2, 2e-2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_step", "precision", "message"),
    [(_step, "f32", "no unbounded stack allocations"), (_embedded, "bf16", "exceeded stack allocation limit")],
)
def test_iree_still_holds_what_a_scatter_reads_on_the_stack(
    make_step: Callable[[], ig.TrainStep],
    precision: str,
    message: str,
    tmp_path: Path,
    without: Callable[[type], None],
) -> None:
    """When both fail, the pass is no longer needed."""
    without(KeepScattersApart)
    with pytest.raises(ToolchainError, match=message):
        ig.compile(make_step(), tmp_path, entry_points=["train_step"], precision=precision)
