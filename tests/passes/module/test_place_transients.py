"""The placement of transients in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.mlir.walk import parsed
from irongrad.passes.module.place_transients import PlaceTransients
from irongrad.pipeline.driver import build
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation
from irongrad.pipeline.iree.report.peak_transients import transients_of
from irongrad.pipeline.options import make_options
from irongrad.targets import Target, parse_target


class Chain(nn.Module):
    """Values of many sizes, each with another live range."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(16, 96), nn.Linear(96, 24)
        self.last = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.narrow(self.wide(x).tanh()).tanh() + x.sum(1, keepdim=True))


def make_step(dynamic: bool = False) -> ig.TrainStep:
    model = Chain()
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.Adam(model.parameters()),
        inputs={"x": torch.randn(40, 16), "y": torch.arange(40) % 3},
        dynamic={"x": {0: "B"}, "y": {0: "B"}} if dynamic else {},
    )


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The portable module of a step."""
    directory = tmp_path_factory.mktemp("step")
    return ig.compile(make_step(), directory / "step").directory.joinpath("step.mlirbc").read_bytes()


def compilation_of(portable: bytes, target: Target, directory: Path) -> Compilation:
    """The compilation of a module as far as the phase `flow`."""
    source = directory / "step.mlirbc"
    source.write_bytes(portable)
    compilation = Compilation.of(source, target, [*COMMON_FLAGS, *target.flags])
    compilation.to_flow()
    return compilation


@pytest.mark.parametrize("name", ["llvm-cpu", "llvm-cpu:arch=aarch64", "vulkan:profile=desktop", "cuda"])
def test_without_a_placement_the_two_halves_are_the_whole_phase(portable, tmp_path, name, is_the_whole_phase):
    """When this fails, IREE's phase `stream` consists of other pipelines than `_SCHEDULE` and `_LOWER`."""
    target = replace(
        parse_target(name), state_in_place=False, disabled_passes=("place-transients", "keep-globals-apart")
    )
    compilation = compilation_of(portable, target, tmp_path)
    is_the_whole_phase(compilation.to_stream(), compilation)


@pytest.mark.parametrize("name", ["llvm-cpu", "vulkan:profile=desktop"])
def test_values_take_less_than_as_iree_places_them(portable, tmp_path, name, without):
    compilation = compilation_of(portable, parse_target(name), tmp_path)

    def allocated() -> int:
        with parsed(compilation.to_stream()) as module:
            return transients_of(module)["train_step"]

    ours = allocated()
    without(PlaceTransients)
    assert ours < allocated()


@pytest.mark.parametrize(("name", "within"), [("llvm-cpu", 0.01), ("cuda", 0.1)])
def test_the_placement_takes_the_predicted_memory(tmp_path, name, within):
    """Also for CUDA, which does not pack operands: a prediction with packing would be too high."""
    made = build(make_step(), make_options(tmp_path / "step", name, entry_points=("train_step",), cache=False))
    (target,) = made.statistics.values()
    assert made.artifact.manifest.memory.predicted["train_step"] == pytest.approx(
        target.transients["train_step"], rel=within
    )


def test_values_of_unknown_sizes_stay_where_iree_places_them(tmp_path):
    step = make_step(dynamic=True)
    artifact = ig.compile(step, tmp_path / "step", entry_points=("train_step",), cache=False)
    x, y = (v.numpy() for v in step.inputs.values())
    assert np.isfinite(artifact.load().train_step(x=x[:7], y=y[:7]))


def test_scratch_files_may_lie_anywhere(portable, tmp_path):
    directory = Path(tmp_path / "a folder, {with} braces")
    directory.mkdir()
    assert compilation_of(portable, parse_target("llvm-cpu"), directory).to_stream()
