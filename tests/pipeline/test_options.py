"""What `ig.compile` takes by name."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import irongrad as ig
from irongrad.pipeline.options import Choices, make_options
from irongrad.runtime.errors import UserError


def test_every_choice_is_an_option():
    named = {p.name: p for p in inspect.signature(make_options).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert named.keys() - Choices.__annotations__.keys() == {"stop_after", "on_stage", "on_measuring"}
    assert Choices.__annotations__.keys() <= named.keys()
    assert all(p.default is not p.empty for p in named.values())


def test_compile_says_that_it_does_not_know_a_name(mlp_step: ig.TrainStep, tmp_path: Path):
    with pytest.raises(TypeError, match=r"compile\(\) got an unexpected keyword argument 'stop_after'"):
        ig.compile(mlp_step, tmp_path / "out", stop_after="capture")  # type: ignore[call-arg]


def test_a_budget_that_no_pass_would_meet_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="max_memory is met by the pass rematerialise, which is disabled"):
        make_options(tmp_path / "artifact", max_memory="50%", disable_passes=["rematerialise"])
