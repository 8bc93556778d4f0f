"""`TrainStep.loss_inputs`: an input that the loss takes too, and the order of the loss's inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError


class Autoencoder(nn.Module):
    """Reconstructs its input."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x).tanh())


def weighted(out: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (weight[:, None] * (out - x) ** 2).mean()


def make_step(**changed: object) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = {"x": torch.randn(8, 6), "weight": torch.rand(8)}
    given = {"model_inputs": ["x"], "loss_inputs": ["weight", "x"]} | changed
    return ig.TrainStep(model, weighted, optimizer, inputs, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model_inputs": None},
        {"accumulate": 2},
        {"dynamic": {"x": {0: "B"}, "weight": {0: "B"}}, "buckets": {"B": [4, 8]}},
        {"dynamic": {"x": {0: "B"}, "weight": {0: "B"}}},
        {"between": ["weight"]},
    ],
    ids=["plain", "by name", "micro-batches", "buckets", "any size", "pieces"],
)
def test_an_input_of_both_trains_as_in_eager(changed: dict[str, object], tmp_path: Path) -> None:
    ig.compile(make_step(**changed), tmp_path / "out")
    session, eager = load(tmp_path / "out"), make_step(**changed)
    (optimizer,) = eager.optimizers
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        batch = {"x": torch.randn(8, 6, generator=generator), "weight": torch.rand(8, generator=generator)}
        optimizer.zero_grad()
        loss = weighted(eager.model(batch["x"]), batch["weight"], batch["x"])
        loss.backward()
        optimizer.step()
        arrays = {n: t.numpy() for n, t in batch.items()}
        if "between" in changed:
            found = session.run_pieces(lambda outputs, **_: {"weight": arrays["weight"]}, x=arrays["x"])  # noqa: B023
        else:
            found = session.train_step(**arrays, **ig.hypers(optimizer))
        assert found == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"loss_inputs": ["weight", "z"]}, "loss_inputs names 'z', which is not in inputs"),
        ({"loss_inputs": ["weight"]}, r"the loss gets \(model_output, weight\), but its signature is"),
        ({"loss_inputs": ["x", "weight"], "between": ["x"]}, "'x', which is not an input of the loss alone"),
    ],
)
def test_loss_inputs_that_do_not_fit_are_refused(changed: dict[str, object], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        make_step(**changed)


def test_a_scheduler_of_pytorch_sets_the_learning_rate(tmp_path: Path) -> None:
    ig.compile(make_step(), tmp_path / "out")
    session, eager = load(tmp_path / "out"), make_step()
    (optimizer,) = eager.optimizers
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5)
    batch = {n: t.numpy() for n, t in eager.inputs.items()}
    for _ in range(5):
        optimizer.zero_grad()
        loss = weighted(eager.model(eager.inputs["x"]), eager.inputs["weight"], eager.inputs["x"])
        loss.backward()
        optimizer.step()
        assert session.train_step(**batch, **ig.hypers(optimizer)) == pytest.approx(loss.item(), rel=1e-4)
        scheduler.step()
