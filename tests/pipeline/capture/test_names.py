"""Names of modules that cannot be written into a compiled step are refused, with the name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.pipeline.assemble.storage import quoted
from irongrad.pipeline.capture.capture import capture
from irongrad.runtime.errors import CaptureError


def step_of(name: str) -> ig.TrainStep:
    model = nn.Sequential()
    model.add_module(name, nn.Linear(4, 3))
    inputs = {"x": torch.randn(5, 4), "y": torch.randint(0, 3, (5,))}
    return ig.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), inputs)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\rb", "a\0b", "a\ud800b"])
def test_a_name_that_cannot_be_written_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="has a character that cannot be written") as caught:
        capture(step_of(name))
    assert ascii(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a'b", "{a}", "a|b", "@a", "ü", "<script>", "a\tb"])
def test_other_names_are_captured(name: str) -> None:
    captured = capture(step_of(name))
    assert f"model.{name}.weight" in captured.train.state_dict


def test_a_literal_of_mlir_escapes_bytes() -> None:
    assert quoted('a"\\ü\n') == "a\\22\\5Cü\\0A"
