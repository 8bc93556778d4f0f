"""The report of memory: the prediction, the bytes that IREE allocates, and the decision for each value."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch._higher_order_ops import scan

import irongrad as ig
from irongrad.cli.main import cli
from irongrad.pipeline.package import Artifact


@pytest.fixture(scope="module", name="artifact")
def artifact_fixture(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    step = ig.TrainStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"x": torch.randn(1024, 32), "y": torch.randint(0, 4, (1024,))},
    )
    directory = tmp_path_factory.mktemp("memory") / "artifact"
    return ig.compile(step, directory, entry_points=("train_step",), max_memory="60%")


def test_prediction_is_within_a_tenth_of_what_iree_allocates(artifact: Artifact) -> None:
    assert artifact.manifest.memory is not None
    predicted = artifact.manifest.memory.predicted["train_step"]
    allocated = artifact.manifest.targets[0].transients["train_step"]
    assert predicted == pytest.approx(allocated, rel=0.1)


class Looped(nn.Module):
    """A recurrence, and a branch to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(32, 64), nn.Linear(64, 8), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = (carried + row).tanh()
            return new, new * carried

        last, rows = scan(step, x.new_zeros(32, 64), self.first(x))
        state = rows.mean(0) + last
        return torch.cond(state.sum() > 0, self.last, self.other, (state,))


def test_the_memory_of_a_loop_and_a_branch_is_predicted(tmp_path: Path) -> None:
    model = Looped()
    step = ig.TrainStep(
        model,
        lambda output, y: (output - y).square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"x": torch.randn(20, 32, 32), "y": torch.randn(32, 8)},
    )
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    assert artifact.manifest.memory is not None
    allocated = artifact.manifest.targets[0].transients["train_step"]
    assert artifact.manifest.memory.predicted["train_step"] == pytest.approx(allocated, rel=0.1)


def test_every_decision_is_listed(artifact: Artifact) -> None:
    assert artifact.manifest.memory is not None
    decisions = {v.decision: v for v in artifact.manifest.memory.values}
    assert set(decisions) == {"saved", "recomputed", "discarded"}
    shown = CliRunner().invoke(cli, ["inspect", "--memory", str(artifact.directory)], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "budget: 60%" in shown.output
    assert "recomputed" in shown.output
