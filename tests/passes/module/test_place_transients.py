"""Where in memory intermediate values lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from iree.compiler import ir
from torch import nn

import irongrad as ig
from irongrad.mlir.walk import constant_of, functions_of, inside, parsed
from irongrad.passes.module.place_transients import lay_out
from irongrad.pipeline.driver import build
from irongrad.pipeline.iree import compile as compilation
from irongrad.pipeline.iree.compile import COMMON_FLAGS, _compile_to_flow, _compile_to_stream, without_plugins
from irongrad.pipeline.iree.report.peak_transients import transients_of
from irongrad.pipeline.options import make_options
from irongrad.targets import Target, parse_target


class Chain(nn.Module):
    """Values of many sizes, of which each is there for another time."""

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
    """The module of a step, as IREE is given it."""
    directory = tmp_path_factory.mktemp("step")
    return ig.compile(make_step(), directory / "step").directory.joinpath("step.mlirbc").read_bytes()


def left_to_iree(module: ir.Module, alignment: int) -> None:
    """In place of `lay_out`."""


def flags_of(target: Target) -> list[str]:
    return [*COMMON_FLAGS, *target.flags, *without_plugins(target)]


@pytest.mark.parametrize("name", ["llvm-cpu", "llvm-cpu:arch=aarch64", "vulkan:profile=desktop", "cuda"])
def test_without_a_placement_the_two_halves_are_the_whole_phase(
    portable, tmp_path, name, monkeypatch, is_the_whole_phase
):
    """When this fails, IREE's phase `stream` is made of other pipelines than `_SCHEDULE` and `_LOWER` name."""
    monkeypatch.setattr(compilation, "lay_out", left_to_iree)
    target = replace(parse_target(name), state_in_place=False)
    source = tmp_path / "step.mlirbc"
    source.write_bytes(portable)
    flags = flags_of(target)
    _compile_to_flow(target, flags, source)
    halves = _compile_to_stream(target, flags, source, tmp_path / "step.vmfb")
    is_the_whole_phase(halves, source, flags)


@pytest.mark.parametrize("name", ["llvm-cpu", "vulkan:profile=desktop"])
def test_values_take_less_than_as_iree_places_them(portable, tmp_path, name, monkeypatch):
    target = parse_target(name)
    source = tmp_path / "step.mlirbc"
    source.write_bytes(portable)
    _compile_to_flow(target, flags_of(target), source)

    def allocated() -> int:
        with parsed(_compile_to_stream(target, flags_of(target), source, tmp_path / "step.vmfb")) as module:
            return transients_of(module)["train_step"]

    ours = allocated()
    monkeypatch.setattr(compilation, "lay_out", left_to_iree)
    assert ours < allocated()


@pytest.mark.parametrize(("name", "within"), [("llvm-cpu", 0.01), ("cuda", 0.1)])
def test_what_is_placed_is_what_was_predicted(tmp_path, name, within):
    """Also where operands are not packed for products: this step would be predicted with too much."""
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


PACKS = """
util.func public @f(%n: index) -> (index, index, index, index) {
  %c64 = arith.constant 64 : index
  %c640 = arith.constant 640 : index
  %known:3 = stream.resource.pack slices({ [0, 1] = %c640, [2, 3] = %c64 }) : index
  %unknown:3 = stream.resource.pack slices({ [0, 1] = %n, [2, 3] = %c64 }) : index
  util.return %known#0, %known#1, %known#2, %unknown#0 : index, index, index, index
}
"""


def test_known_sizes_become_places_and_others_are_left():
    with parsed(PACKS.encode()) as module:
        lay_out(module, 64)
        (function,) = functions_of(module)
        (returned,) = [op for op in inside(function) if op.name == "util.return"]
        assert [constant_of(value) for value in returned.operands] == [640, 0, 0, None]


def test_scratch_files_may_lie_anywhere(portable, tmp_path):
    target, directory = parse_target("llvm-cpu"), Path(tmp_path / "a folder, {with} braces")
    directory.mkdir()
    source = directory / "step.mlirbc"
    source.write_bytes(portable)
    _compile_to_flow(target, flags_of(target), source)
    assert _compile_to_stream(target, flags_of(target), source, directory / "step.vmfb")
