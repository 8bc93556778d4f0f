"""With `tune`, each convolution takes the form that is fastest by measurement."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import irongrad as ig
from irongrad.cli.main import cli
from irongrad.passes.base import Measured
from irongrad.pipeline import tuned_step
from irongrad.pipeline.package import Artifact
from irongrad.runtime.errors import UserError

STEP = """
import torch
from torch import nn
import irongrad as ig

def make_step():
    torch.manual_seed(0)
    body = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    inputs = {"x": torch.randn(8, 16, 16, 16), "y": torch.randint(0, 10, (8,))}
    return ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), inputs)
"""


class Watch:
    """Reports Winograd's forms as the fastest, then forms that the table of costs would not choose."""

    def __init__(self, targets, store, budget):
        self.targets, self.store, self.budget = targets, store, budget

    def expect(self, count):
        self.budget.expected += count

    def __call__(self, what, candidates, operands):
        order = ["winograd", "by-row", "gathered", "scattered", "windowed", "direct"]
        faster = tuple(name for name in order if name in candidates)
        return Measured({name: 1e-3 * (1 + order.index(name)) for name in candidates}, faster)


@pytest.fixture(scope="module", name="tuned")
def tuned_fixture(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    names: dict[str, object] = {}
    exec(STEP, names)
    make_step = names["make_step"]
    assert callable(make_step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("irongrad.pipeline.driver.Stopwatch", Watch)
        patch.setattr(
            tuned_step, "paired", lambda *_: [(0.5, 1.0)] * 9
        )  # the whole step: which is faster differs by CPU
        directory = tmp_path_factory.mktemp("tuned") / "artifact"
        artifact = ig.compile(make_step(), directory, entry_points=("train_step",), tune=True, tune_seconds=0)
    return artifact


def test_the_manifest_lists_the_chosen_forms_and_their_times(tuned):
    choices = {c.what: c for c in tuned.manifest.tuned}
    first = choices["forward 8x16x16x16 32x16x3x3 stride 1,1 padding 1,1 dilation 1,1"]
    assert first.chosen == "winograd"
    assert first.seconds["winograd"] == min(first.seconds.values())
    assert {what.split()[0] for what in choices} == {"forward", "input", "weight"}


def test_memory_is_predicted_for_a_network_of_convolutions(tuned):
    predicted = tuned.manifest.memory.predicted["train_step"]
    assert predicted == pytest.approx(tuned.manifest.targets[0].transients["train_step"], rel=0.1)


def test_a_step_is_not_tuned_for_another_machine(tmp_path):
    file = tmp_path / "step.py"
    file.write_text(
        STEP.replace("nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()", "").replace("8, 16, 16, 16", "8, 16, 4, 4")
    )
    command = ["compile", f"{file}:make_step", "-o", str(tmp_path / "out"), "--tune", "--no-cache"]
    result = CliRunner().invoke(cli, [*command, "--target", "llvm-cpu:arch=aarch64"])
    assert isinstance(result.exception, UserError) or result.exit_code != 0
    assert "cannot run here" in f"{result.output}{result.exception}"
    assert not (tmp_path / "out").exists()
