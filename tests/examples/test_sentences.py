"""Sentences of every length, trained in buckets and compared with eager PyTorch, which does not pad."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import irongrad as ig

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


def test_training_on_sentences_matches_eager(sentences: ModuleType, check_losses: Callable[..., None], tmp_path: Path):
    step = sentences.make_step(width=16, heads=2, layers=1, rows=[16], words=[16])
    batches = [b for b in sentences.batches(seed=1) if b["x"].shape[1] <= 16][:6]
    assert len({b["x"].shape for b in batches}) > 4
    session = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",)).load()
    check_losses([session.train_step(**b) for b in batches], lambda dtype: _eager(sentences, step, batches, dtype))


@pytest.mark.slow
def test_the_whole_example_trains_as_eager_does(
    sentences: ModuleType, check_losses: Callable[..., None], tmp_path: Path
):
    """Sixty steps in six buckets; the held-out loss falls."""
    step, batches = sentences.make_step(), list(islice(sentences.batches(seed=1), 60))
    session = ig.compile(step, tmp_path / "artifact", entry_points=("train_step", "eval_step")).load()
    before = np.mean([session.eval_step(**b) for b in sentences.batches(train=False)])
    check_losses([session.train_step(**b) for b in batches], lambda dtype: _eager(sentences, step, batches, dtype))
    assert np.mean([session.eval_step(**b) for b in sentences.batches(train=False)]) < before - 1


def _eager(
    sentences: ModuleType, step: ig.TrainStep, batches: Sequence[dict[str, np.ndarray]], dtype: torch.dtype
) -> list[float]:
    twin = sentences.Eager(step, dtype)
    return [twin.train_step(**b) for b in batches]
