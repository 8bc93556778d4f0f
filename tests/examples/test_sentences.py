"""Sentences of every length, trained in buckets beside eager PyTorch, which does not pad."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import irongrad as ig
from irongrad.pipeline.oracle import FACTOR, FLOOR_ULPS, NOISY_RUNS, RoundingNoise
from irongrad.runtime import Session

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("sentences")


def test_sentences_are_of_every_length_and_not_padded(sentences: ModuleType):
    batches = list(sentences.batches())
    assert len({b["x"].shape for b in batches}) > 50
    assert sum(b["x"].size for b in batches) == sum(map(len, sentences.coded()[0]))
    for batch in batches:
        hidden = batch["x"] == sentences.HIDDEN
        assert hidden.any(axis=1).all()
        np.testing.assert_array_equal(hidden, batch["y"] != sentences.KNOWN)


def test_training_on_sentences_is_as_eager_does_it(sentences: ModuleType, tmp_path: Path):
    step = sentences.make_step(width=16, heads=2, layers=1, rows=[8, 16], words=[16])
    _check_curve(sentences, step, tmp_path, steps=12, entry_points=("train_step",))


@pytest.mark.slow
def test_the_whole_example_trains_as_eager_does(sentences: ModuleType, tmp_path: Path):
    """A hundred steps; the held-out loss falls."""
    entry_points = ("train_step", "eval_step", "reset")
    session = _check_curve(sentences, sentences.make_step(), tmp_path, steps=100, entry_points=entry_points)
    after = np.mean([session.eval_step(**b) for b in sentences.batches(train=False)])
    session.reset()
    before = np.mean([session.eval_step(**b) for b in sentences.batches(train=False)])
    assert after < before - 1


def _check_curve(
    sentences: ModuleType, step: ig.TrainStep, folder: Path, *, steps: int, entry_points: tuple[str, ...]
) -> Session:
    """Hold every loss to the number contract: within a small factor of eager float32's own distance from float64."""
    largest = step.bucket_list[-1]["T"]
    batches = list(islice((b for b in sentences.batches(seed=1) if b["x"].shape[1] <= largest), steps))
    assert len({b["x"].shape for b in batches}) > steps // 3
    session = ig.compile(step, folder / "artifact", entry_points=entry_points).load()

    def eager(dtype: torch.dtype, seed: int | None = None) -> np.ndarray:
        twin = sentences.Eager(step, dtype)
        with RoundingNoise(seed) if seed is not None else nullcontext():
            return np.array([twin.train_step(**b) for b in batches])

    exact = eager(torch.float64)
    spread = np.max([np.abs(eager(torch.float32, s) - exact) for s in (None, *range(NOISY_RUNS))], axis=0)
    found = np.array([session.train_step(**b) for b in batches])
    allowed = FACTOR * spread + FLOOR_ULPS * np.finfo(np.float32).eps * exact
    assert (np.abs(found - exact) <= allowed).all(), (found - exact, allowed)
    return session
