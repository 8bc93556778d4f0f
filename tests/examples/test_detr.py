"""A DETR compiled in two pieces, with scipy's matching between them, compared with eager PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import irongrad as ig

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 12


@pytest.fixture
def detr(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("detr")


def test_scenes_match_their_boxes(detr: ModuleType):
    batch = next(detr.batches(8))
    assert set((batch["classes"] != detr.NONE).sum(1)) == {1, 2, 3}
    for image, classes, boxes in zip(batch["image"], batch["classes"], batch["boxes"], strict=True):
        outside = image[0].copy()
        for x, y, width, height in boxes[classes != detr.NONE] * detr.SIZE:
            left, top, width, height = map(round, (x - width / 2, y - height / 2, width, height))
            assert outside[top : top + height, left : left + width].any()
            outside[top : top + height, left : left + width] = 0
        assert not outside.any()


def test_the_matching_is_the_cheapest(detr: ModuleType):
    """A query that predicts an object exactly is matched to it, whatever the order of the queries."""
    boxes = np.array([[[0.2, 0.2, 0.3, 0.3], [0.7, 0.7, 0.2, 0.4], [0.5, 0.5, 0.5, 0.5]]], np.float32)
    classes = np.array([[4, 7, detr.NONE]])
    outputs = {"logits": np.zeros((1, 4, 11), np.float32), "boxes": np.full((1, 4, 4), 0.5, np.float32)}
    outputs["boxes"][0, 3], outputs["boxes"][0, 1] = boxes[0, 0], boxes[0, 1]
    np.testing.assert_array_equal(detr.match(outputs, classes, boxes)["owner"], [[3, 1, 3, 0]])


@pytest.mark.slow
def test_pieces_train_as_eager_does(detr: ModuleType, check_losses: Callable[..., None], tmp_path: Path):
    """`tests/pipeline/optimizer/test_split_step.py` trains a smaller step in pieces, in the default run."""
    step = detr.make_step(batch=4, width=16, heads=2, layers=1, queries=4)
    batches = list(islice(detr.batches(4, seed=1), STEPS))
    session = ig.compile(step, tmp_path / "artifact", entry_points=("forward", "finish_step")).load()
    found = [session.run_pieces(detr.match, **b) for b in batches]

    def eager(dtype: torch.dtype) -> list[float]:
        twin = detr.Eager(step, dtype)
        return [twin.train_step(detr.match, **b) for b in batches]

    check_losses(found, eager)
    assert np.mean(found[-4:]) < np.mean(found[:4])
