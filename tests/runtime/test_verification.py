"""The error of a compiled value, and the expected values that an artifact keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import irongrad as ig
from irongrad.runtime.golden import SAMPLE, Golden, are_same, kept, read_golden, sampled, write_golden
from irongrad.runtime.session import Session
from irongrad.runtime.verification import golden_steps, largest_error, verify

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8, np.bool_)
NUMBERS = st.floats(width=16)


def error_of_one(value: float, expected: float) -> float:
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    difference = abs(value - expected)
    return math.inf if math.isnan(difference) else difference


@given(pairs=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5), dtype=st.sampled_from(DTYPES[:4]))
def test_the_largest_error_is_the_maximum_over_elements(pairs: list[tuple[float, float]], dtype: type) -> None:
    value, expected = (np.array([p[i] for p in pairs], dtype) for i in (0, 1))
    wide = expected.astype(np.float64)
    errors = [error_of_one(float(v), float(e)) for v, e in zip(value, wide, strict=True)]
    assert largest_error(value, wide) == max(errors, default=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_compared_as_float64(dtype: type) -> None:
    value = np.array([[0, 1], [1, 0]], dtype)
    assert largest_error(value, value.astype(np.float64) + np.array([[0.25, 0], [0, 0]])) == 0.25
    assert largest_error(np.array(1, dtype), np.array(1.5)) == 0.5
    assert largest_error(value, np.zeros(4)) == math.inf


def test_a_sample_is_compared_with_the_elements_that_it_came_from() -> None:
    whole = np.random.default_rng(0).normal(size=(3, SAMPLE)).astype(np.float32)
    sample = sampled(whole.astype(np.float64))
    assert sample.shape == (SAMPLE,)
    assert largest_error(whole, sample) == 0.0
    assert largest_error(whole + np.float32(2.0), sample) == pytest.approx(2.0)


def golden_values() -> Golden:
    inputs = {f"x{n}": np.arange(3).astype(dtype) for n, dtype in enumerate(DTYPES)}
    expected = {
        "loss/0/": np.array(0.1),
        "state/1/w": np.array([0.0, math.inf, math.nan]),
        "large": np.ones((2, SAMPLE)),
    }
    return Golden(1, "float64", inputs, expected, {"loss/0/": 0.1, "state/1/w": math.inf, "large": 1e-17})


def test_golden_values_that_are_read_equal_the_kept_ones(tmp_path: Path) -> None:
    golden = golden_values()
    write_golden(golden, tmp_path / "golden")
    assert are_same(read_golden(tmp_path / "golden"), kept(golden))
    assert not are_same(read_golden(tmp_path / "golden"), golden)


def test_one_bit_makes_another_golden_value() -> None:
    golden = golden_values()
    off = {**golden.expected, "loss/0/": np.nextafter(golden.expected["loss/0/"], 1)}
    assert are_same(golden, golden_values())
    assert not are_same(golden, replace(golden, expected=off))
    assert not are_same(golden, replace(golden, allowed={**golden.allowed, "large": 1.1e-17}))
    assert not are_same(golden, replace(golden, inputs={**golden.inputs, "x0": np.array([0.0, 1.0, -2.0])}))
    assert not are_same(golden, replace(golden, inputs={**golden.inputs, "x1": golden.inputs["x0"]}))


def test_an_error_in_the_last_of_many_elements_is_found() -> None:
    """Arrays are compared in blocks."""
    exact = np.zeros((3, 100_003))
    value = exact.astype(np.float32)
    value[-1, -1] = 0.5
    assert largest_error(value, exact) == 0.5
    value[1, 0] = exact[1, 0] = np.nan
    assert largest_error(value, exact) == 0.5
    value[2, 0] = np.nan
    assert largest_error(value, exact) == np.inf


def test_the_state_that_train_and_export_returns_is_verified(tmp_path: Path) -> None:
    """It used to be the only entry point that nothing compared: alone, it could not be packaged."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inputs = {"x": torch.randn(8, 4), "y": torch.randint(0, 2, (8,))}
    step = ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=0.1), inputs)
    artifact = ig.compile(step, tmp_path, entry_points=("train_and_export",), cache=False)
    compared = artifact.reports["llvm-cpu"].comparisons
    by_entry = {name: {c.key for c in compared if c.entry_point == name} for name in {c.entry_point for c in compared}}
    assert by_entry.keys() == {"train_and_export", "train_and_export, export_state"}
    assert {"loss/0/", "loss/2/", "state/3/weight", "state/3/bias"} <= by_entry["train_and_export"]
    assert {"state/3/weight", "state/3/bias"} <= by_entry["train_and_export, export_state"]


def test_a_fresh_session_is_put_back_in_both_ways_and_any_other_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reset` brings back what was loaded, which is the initial state only if nothing else was."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inputs = {"x": torch.randn(8, 4), "y": torch.randint(0, 2, (8,))}
    step = ig.TrainStep(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=0.1), inputs)
    artifact = ig.compile(step, tmp_path / "out", cache=False)
    golden = read_golden(artifact.directory / "golden.safetensors")
    ways: list[str] = []
    reset, load_state = Session.reset, Session.load_state
    monkeypatch.setattr(Session, "reset", lambda self: (ways.append("reset"), reset(self))[1])
    monkeypatch.setattr(Session, "load_state", lambda self, state: (ways.append("file"), load_state(self, state))[1])
    assert golden_steps(artifact.load(), golden, is_fresh=True).passed
    assert ways[0] == "file"
    assert {*ways[1:]} == {"reset"}
    trained = artifact.load()
    trained.train_step(**golden.inputs)
    trained.save(tmp_path / "trained")
    ways.clear()
    assert verify(artifact.load(checkpoint=tmp_path / "trained"), {"": golden}).passed
    assert {*ways} == {"file"}
