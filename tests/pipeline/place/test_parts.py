"""What `place` may say, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.pipeline.options import make_options
from irongrad.pipeline.place.parts import check_parts, parts_of
from irongrad.runtime.errors import UserError


def make_step(**options: object) -> ig.TrainStep:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"input": torch.randn(4, 4), "y": torch.randint(0, 2, (4,))}
    return ig.TrainStep(model, F.cross_entropy, optimizer, inputs, **options)


@pytest.mark.parametrize(
    "place",
    [
        {"encoder": "llvm-cpu:cpu=x86-64-v3,features=+fma", "head+norm": "vulkan:profile=lavapipe,subgroup=4"},
        ["encoder=llvm-cpu:cpu=x86-64-v3,features=+fma,head+norm=vulkan:profile=lavapipe,subgroup=4"],
        ["encoder=llvm-cpu:cpu=x86-64-v3,features=+fma", "head+norm=vulkan:profile=lavapipe,subgroup=4"],
    ],
)
def test_a_mapping_and_texts_say_the_same(place):
    first, second = parts_of(place)
    assert (first.paths, second.paths) == (("encoder",), ("head", "norm"))
    assert first.asked == "llvm-cpu:cpu=x86-64-v3,features=+fma"
    assert second.asked == "vulkan:profile=lavapipe,subgroup=4"
    assert (first.target.backend, second.target.subgroup) == ("llvm-cpu", 4)
    assert second.target.name == "head-norm-vulkan-lavapipe-4"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (["encoder"], "'encoder', which is no PATH=TARGET"),
        ({"a": "llvm-cpu"}, "place names one part, 'a': name another for the rest, or compile the whole"),
        ({"a": "llvm-cpu", "b": "cpu"}, "unknown target 'cpu'"),
        ({"a+b": "llvm-cpu", "b": "vulkan"}, "place names 'b' twice"),
    ],
)
def test_what_is_no_placement_is_refused(place, message):
    with pytest.raises(UserError, match=message):
        parts_of(place)


def test_the_files_of_parts_with_many_modules_have_short_names():
    many = "+".join(f"blocks.{n}.attention" for n in range(30))
    first, second = parts_of({many: "llvm-cpu", "head": "llvm-cpu"})
    assert first.target.name == "blocks.0.attention-and-29-more-llvm-cpu"
    assert len(first.paths) == 30
    assert second.target.name == "head-llvm-cpu"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"communicate": True}, "place does not work with communicate"),
        ({"max_memory": "1MiB"}, "place does not work with max_memory"),
        ({"entry_points": ["train_steps"]}, "place does not work with train_steps, which loops inside a module"),
    ],
)
def test_other_choices_are_refused_beside_it(tmp_path, choices, message):
    with pytest.raises(UserError, match=message):
        make_options(tmp_path / "a", place={"0": "llvm-cpu", "2": "vulkan"}, **choices)


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ({"0": "llvm-cpu", "3": "vulkan"}, {}, "place names '3', and the model has no such module or parameter; the"),
        ({"0": "llvm-cpu", "2.weigth": "vulkan"}, {}, "did you mean '2.weight'"),
        ({"0": "llvm-cpu", "2": "vulkan"}, {"accumulate": 2}, "place does not work with accumulate"),
        (
            {"0": "llvm-cpu", "2": "vulkan"},
            {"dynamic": {"input": {0: "B"}, "y": {0: "B"}}},
            "place does not work with sizes that vary: leave out dynamic",
        ),
    ],
)
def test_paths_and_steps_are_checked(place, options, message):
    with pytest.raises(UserError, match=message):
        check_parts(parts_of(place), make_step(**options))


def test_a_part_that_computes_nothing_is_refused(tmp_path):
    step = make_step()
    unused = nn.ModuleDict({"net": step.model, "spare": nn.Linear(2, 2)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = unused

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.parts["net"](input)

    model = Model()
    optimizer = torch.optim.SGD(model.parts["net"].parameters(), lr=0.1)
    placed = ig.TrainStep(model, F.cross_entropy, optimizer, step.inputs)
    with pytest.raises(UserError, match=r"a part 'parts\.spare' that computes nothing in this step: leave it out"):
        ig.compile(placed, tmp_path / "a", place={"parts.net": "llvm-cpu", "parts.spare": "llvm-cpu"})


def test_several_steps_are_refused(tmp_path):
    step = make_step()
    with pytest.raises(UserError, match="place does not work with several steps over one state"):
        ig.compile(ig.Steps({"a": step, "b": step}), tmp_path / "a", place={"0": "llvm-cpu", "2": "vulkan"})
