"""The proposed placement is the best division by the models, and one that a compilation takes."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.cli import place
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.place.units import divisions, units_of
from irongrad.runtime.errors import UserError
from irongrad.targets import parse_target

WIDTHS = (32, 64, 64, 64, 8)
STEP = """
import irongrad as ig
import torch
from torch import nn

def make_step():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip({widths}, {widths}[1:])]
    model = nn.Sequential(*layers)
    inputs = {{"input": torch.randn(16, 32), "y": torch.randint(0, 8, (16,))}}
    return ig.TrainStep(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), inputs)
"""


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(WIDTHS)]
    model = nn.ModuleDict({"body": nn.Sequential(*blocks)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["body"](x)

    whole = Model()
    inputs = {"x": torch.randn(16, 32), "y": torch.randint(0, 8, (16,))}
    return ig.TrainStep(whole, F.cross_entropy, torch.optim.Adam(whole.parameters()), inputs)


TARGETS = ["llvm-cpu", "llvm-cpu"]


def first_part(**options: object) -> int:
    """How many modules the first part has."""
    return len(ig.propose_placement(make_step(), TARGETS, **options).parts[0].paths)


def test_containers_are_divided_and_modules_are_in_the_order_of_the_forward():
    step = make_step()
    units = units_of(step_graph(step), step.model, parse_target("llvm-cpu"), 2)
    linear = [path for path in units.paths if path.endswith(".0")]
    assert linear == [f"parts.body.{n}.0" for n in range(4)]
    sizes = [a * b + b for a, b in itertools.pairwise(WIDTHS)]
    held = dict(zip(units.paths, units.state, strict=True))
    assert [held[path] for path in linear] == [4 * 4 * size for size in sizes]  # weights, two moments, gradients


def test_every_division_has_consecutive_modules_and_the_costs_of_all():
    step = make_step()
    units = units_of(step_graph(step), step.model, parse_target("llvm-cpu"), 3)
    found = list(divisions(units, 3))
    count = len(units.paths)
    assert len({d.bounds for d in found}) == (count - 1) * (count - 2) // 2
    for division in found:
        assert sum(division.costs) == pytest.approx(sum(units.costs))
        assert sum(division.state) == sum(units.state)
        assert division.passed > 0


def test_a_faster_target_gets_more():
    even = first_part()
    assert first_part(speed=[1.0, 20.0]) < even < first_part(speed=[20.0, 1.0])


def test_a_part_gets_what_fits_into_its_memory():
    plain = ig.propose_placement(make_step(), TARGETS)
    small = plain.parts[0].memory - 1
    limited = ig.propose_placement(make_step(), TARGETS, memory=[str(small), "1GiB"])
    assert limited.parts[0].memory <= small
    assert len(limited.parts[0].paths) < len(plain.parts[0].paths)
    with pytest.raises(UserError, match="no division of the model fits into this memory; the one with the smallest"):
        ig.propose_placement(make_step(), TARGETS, memory=["1KiB", "1KiB"])


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (["llvm-cpu"], {}, "give at least two targets"),
        (TARGETS, {"memory": ["1GiB"]}, "there are 2 targets: give the memory of each, or of none"),
        (TARGETS, {"speed": [1.0, 0.0]}, "a speed above zero"),
        (["llvm-cpu"] * 12, {}, r"the model has \d modules to divide, and there are 12 targets"),
    ],
)
def test_what_cannot_be_divided_is_refused(targets, options, message):
    with pytest.raises(UserError, match=message):
        ig.propose_placement(make_step(), targets, **options)


def test_a_compilation_takes_the_proposal(tmp_path):
    proposal = ig.propose_placement(make_step(), TARGETS)
    artifact = ig.compile(make_step(), tmp_path / "a", place=proposal.place, entry_points=["grad_step"])
    assert [part.name for part in artifact.manifest.placement.parts] == [*proposal.place]
    for target, part in zip(artifact.manifest.targets, proposal.parts, strict=True):
        taken = max(target.transients.values())  # grad_step takes the most of all entry points
        assert taken == pytest.approx(part.transients, rel=0.1)


def test_the_command_prints_what_compile_takes(tmp_path):
    (tmp_path / "step.py").write_text(STEP.format(widths=WIDTHS))
    options = [f"{tmp_path / 'step.py'}:make_step", "--target", "llvm-cpu", "--target", "vulkan"]
    shown = CliRunner().invoke(place.command, options, catch_exceptions=False).output
    found = json.loads(CliRunner().invoke(place.command, [*options, "--json"], catch_exceptions=False).output)
    assert [*found["place"].values()] == ["llvm-cpu", "vulkan"]
    assert " ".join(f"--place {name}={target}" for name, target in found["place"].items()) in shown
