"""Models of the zoo: one is compiled, others have their operators checked. `./scripts/models` compiles all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import irongrad as ig
from irongrad.pipeline.check_step import check

ZOO = Path(__file__).parents[2] / "scripts" / "modelzoo"

Zoo = dict[str, Callable[..., ig.TrainStep]]

COMPILED = ("GPT-2",)
CHECKED = {"Mixtral": {"layers": 1}, "ResNet": {}}  # with options; one layer is enough if all layers are alike
ELSEWHERE = ("YOLOv8",)  # needs ultralytics, which the tests do not depend on


@pytest.fixture(scope="module")
def zoo() -> Iterator[Zoo]:
    """The models by name; none of them downloads anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.syspath_prepend(str(ZOO))
        import zoo

        yield zoo.MODELS


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps_agree_with_eager_float64(name: str, zoo: Zoo, tmp_path: Path) -> None:
    torch.manual_seed(0)
    artifact = ig.compile(zoo[name](), tmp_path / "artifact", entry_points=["train_step", "predict"])
    report = artifact.reports["llvm-cpu"]
    assert report.passed
    assert report.oracle == "float64"


# Mixtral's kinds of operators are in other default tests: GPT-2 has the attention, test_sorting.py has routers.
@pytest.mark.parametrize("name", [pytest.param("Mixtral", marks=pytest.mark.slow), "ResNet"])
def test_every_operator_can_be_compiled(name: str, zoo: Zoo) -> None:
    assert check(zoo[name](**CHECKED[name])).refusals == ()


@pytest.mark.slow
def test_every_operator_of_the_others_can_be_compiled(zoo: Zoo) -> None:
    others = set(zoo) - {*COMPILED, *CHECKED, *ELSEWHERE}
    assert len(others) > 10
    assert {name: check(zoo[name]()).refusals for name in others} == dict.fromkeys(others, ())
