"""Data sets of other libraries: PyTorch's DataLoader, and data sets of Hugging Face, with their own packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from irongrad.runtime import Session
from irongrad.training import Checkpoints, Padded, Samples, Stop, restore, train
from irongrad.training.events import Event, Stepped

ROWS = 60


@pytest.fixture
def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((ROWS, 8)).astype(np.float32), "y": rng.integers(0, 4, ROWS)}


class Streamed(IterableDataset):  # type: ignore[type-arg]
    """Samples without a length or an index."""

    def __init__(self, rows: dict[str, np.ndarray]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        for i in range(ROWS):
            yield {name: array[i] for name, array in self.rows.items()}


def named(batch: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    x, y = zip(*batch, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def loader(rows: dict[str, np.ndarray], manifest: Any) -> Any:
    """A shuffled loader; its sampler takes the order from the number of the epoch."""
    tensors = TensorDataset(*map(torch.from_numpy, rows.values()))
    sampler = DistributedSampler(tensors, num_replicas=1, rank=0, seed=3)
    return DataLoader(tensors, batch_size=6, sampler=sampler, collate_fn=named, drop_last=True)


def loader_with_a_worker(rows: dict[str, np.ndarray], manifest: Any) -> Any:
    return DataLoader(Streamed(rows), batch_size=6, num_workers=1, multiprocessing_context="spawn")


def hugging_face(rows: dict[str, np.ndarray], **options: Any) -> Any:
    datasets = pytest.importorskip("datasets", reason="the extra test installs datasets")
    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({n: a.tolist() for n, a in rows.items()} | {"title": ["news"] * ROWS}, **options)


def samples_of_hugging_face(rows: dict[str, np.ndarray], manifest: Any) -> Any:
    return Samples(hugging_face(rows), 6, seed=1, collate=Padded(manifest))


def samples_as_numpy(rows: dict[str, np.ndarray], manifest: Any) -> Any:
    datasets = pytest.importorskip("datasets", reason="the extra test installs datasets")
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32")),
            "y": datasets.Value("int64"),
            "title": datasets.Value("string"),
        }
    )
    return Samples(hugging_face(rows, features=features).remove_columns("title").with_format("numpy"), 6)


def loader_of_hugging_face(rows: dict[str, np.ndarray], manifest: Any) -> Any:
    data = hugging_face(rows).remove_columns("title").with_format("torch")
    return DataLoader(data, batch_size=6)


def streaming_hugging_face(rows: dict[str, np.ndarray], manifest: Any) -> Any:
    """Batches of a data set that is read as a stream, whose order depends on its epoch."""
    data = hugging_face(rows).remove_columns("title").to_iterable_dataset(num_shards=3)
    return data.shuffle(seed=2, buffer_size=20).with_format("numpy").batch(6)


DATA: dict[str, Callable[[dict[str, np.ndarray], Any], Any]] = {
    make.__name__: make
    for make in (
        loader, loader_with_a_worker, samples_of_hugging_face, samples_as_numpy, loader_of_hugging_face,
        streaming_hugging_face,
    )
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_it_trains_and_resumes_to_the_bit(
    mlp_artifact: Path, rows: dict[str, np.ndarray], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "net.safetensors"

    def losses(session: Session, **options: Any) -> list[float]:
        stop, seen = Stop(), list[float]()

        def note(event: Event) -> None:
            if isinstance(event, Stepped):
                seen.append(event.loss)
            if isinstance(event, Stepped) and event.step == options.get("stop_at"):
                stop.request("enough")

        train(
            session, DATA[kind](rows, session.manifest), steps=25, prefetch=2, callbacks=[note], stop=stop,
            checkpoints=Checkpoints(path), start=options.get("start"),
        )  # fmt: skip
        return seen

    with Session(mlp_artifact) as whole, Session(mlp_artifact) as first, Session(mlp_artifact) as second:
        expected = losses(whole)
        begun = losses(first, stop_at=13)
        rest = losses(second, start=restore(second, path))
    assert len(expected) == 25
    assert begun + rest == expected
    assert len(set(expected)) == 25
