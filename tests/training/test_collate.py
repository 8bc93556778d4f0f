"""Ragged samples padded to the sizes that an artifact is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError, UserError
from irongrad.training import Padded, Samples, train


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * mask.unsqueeze(-1)
        mean = x.sum(1, keepdim=True) / mask.sum(1).clamp(min=1).view(-1, 1, 1)
        return ((x + mean) * self.scale).transpose(1, 2)


def _step(**options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Tagger()
    inputs = {
        "ids": torch.zeros(4, 8, dtype=torch.int64),
        "mask": torch.ones(4, 8),
        "tags": torch.zeros(4, 8, dtype=torch.int64),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return ig.TrainStep(model, nn.CrossEntropyLoss(), optimizer, inputs, **options)


DYNAMIC = {name: {0: "B", 1: "T"} for name in ("ids", "mask", "tags")}
WAYS: dict[str, dict[str, Any]] = {
    "buckets": {"dynamic": DYNAMIC, "buckets": {"B": [4], "T": [4, 8]}},
    "any size": {"dynamic": DYNAMIC},
    "fixed": {},
}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    found = {}
    for name, options in WAYS.items():
        directory = tmp_path_factory.mktemp("collate") / "step"
        ig.compile(_step(**options), directory, opt_level=0, entry_points=["train_step", "eval_step"])
        found[name] = Session(directory)
    return found


def samples(*lengths: int) -> list[dict[str, Any]]:
    """Samples as Python lists, with a key that the step does not take."""
    rng = np.random.default_rng(0)
    return [
        {"ids": rng.integers(0, 11, n).tolist(), "tags": rng.integers(0, 3, n).tolist(), "text": "…"} for n in lengths
    ]


@pytest.mark.parametrize(("way", "lengths", "size"), [
    ("buckets", (1, 3), 4), ("buckets", (2, 4, 4, 1), 4), ("buckets", (5, 2), 8), ("any size", (5, 2, 3), 5),
    ("fixed", (3, 2, 1, 5), 8),
])  # fmt: skip
def test_the_padding_does_not_change_the_loss(
    sessions: dict[str, Session], way: str, lengths: tuple[int, ...], size: int
) -> None:
    session, given = sessions[way], samples(*lengths)
    batch = Padded(session.manifest, mask="mask")(given)
    assert {n: (a.shape, a.dtype.name) for n, a in batch.items()} == {
        "ids": ((len(lengths), size), "int64"),
        "mask": ((len(lengths), size), "float32"),
        "tags": ((len(lengths), size), "int64"),
    }
    model = _step().model
    losses = []
    for sample in given:
        ids, tags = torch.tensor([sample["ids"]]), torch.tensor([sample["tags"]])
        losses += [nn.functional.cross_entropy(model(ids, torch.ones(ids.shape)), tags, reduction="sum")]
    expected = sum(losses).item() / sum(lengths)
    assert session.eval_step(**batch) == pytest.approx(expected, rel=1e-5)


def test_a_number_for_each_sample_is_stacked(mlp_artifact: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    batch = Padded(Session(mlp_artifact).manifest)([{"x": row.tolist(), "y": n % 4} for n, row in enumerate(x)])
    np.testing.assert_array_equal(batch["x"], x)
    np.testing.assert_array_equal(batch["y"], np.arange(6) % 4)
    assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int64)


def test_the_padding_is_the_ignored_target_or_what_is_asked_for(sessions: dict[str, Session]) -> None:
    manifest = sessions["buckets"].manifest
    batch = Padded(manifest, mask="mask")(samples(1, 2))
    assert batch["tags"][0, 1:].tolist() == [-100] * 3
    assert batch["ids"][0, 1:].tolist() == [0] * 3
    assert batch["mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    batch = Padded(manifest, mask="mask", fill={"ids": 10})(samples(1, 2))
    assert batch["ids"][0, 1:].tolist() == [10] * 3


def test_a_ragged_data_set_trains(sessions: dict[str, Session]) -> None:
    session = sessions["buckets"]
    data = samples(*np.random.default_rng(1).integers(1, 9, 40))
    result = train(session, Samples(data, 4, collate=Padded(session.manifest, mask="mask")), epochs=30)
    assert result.epochs[-1].loss < result.epochs[0].loss - 0.1


def _with(key: str, value: Any) -> list[dict[str, Any]]:
    return [{**samples(3)[0], key: value}]


REFUSED: dict[str, tuple[str, Callable[[], list[dict[str, Any]]], str]] = {
    "too long": ("buckets", lambda: samples(9), "a batch has T = 9, and the step takes 8 at most: cut the samples"),
    "too many": ("buckets", lambda: samples(1, 1, 1, 1, 1), "a batch has B = 5, and the step takes 4 at most"),
    "too long for a fixed size": ("fixed", lambda: samples(9), r"ids: a sample is \[9\], and \[8\] is the most"),
    "rank": ("buckets", lambda: _with("ids", [[1, 2, 3]]), "ids: a sample has 2 dimensions, and the step takes 1"),
    "kind": ("buckets", lambda: _with("tags", [0.5, 1, 1]), "tags: a sample is float64, and the step takes int64"),
    "text": ("buckets", lambda: _with("ids", ["a"]), "ids: a sample is <U1, and the step takes int64"),
    "missing": ("buckets", lambda: [{"ids": [1]}], r"a sample has no 'tags'; it has ids\. If .*mask='tags'"),
    "ragged inside": ("buckets", lambda: _with("ids", [[1], [1, 2]]), "ids: a sample is no array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_samples_that_do_not_fit_are_refused(sessions: dict[str, Session], case: str) -> None:
    way, make, message = REFUSED[case]
    with pytest.raises(GuardError, match=message):
        Padded(sessions[way].manifest, mask="mask")(make())


def test_settings_that_name_no_input_are_refused(sessions: dict[str, Session], mlp_artifact: Path) -> None:
    with pytest.raises(UserError, match="'attention' is no input of the step; it takes ids, mask, tags"):
        Padded(sessions["buckets"].manifest, mask="attention")
    with pytest.raises(UserError, match="no other input has the shape of x"):
        Padded(Session(mlp_artifact).manifest, mask="x")
