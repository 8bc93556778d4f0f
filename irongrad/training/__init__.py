"""Train an artifact: the loop, schedules, data and checkpoints of a run. Needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irongrad.training.collate import Padded
    from irongrad.training.evaluation import Evaluation, InOrder, evaluate
    from irongrad.training.events import Callback, JsonLines
    from irongrad.training.loop import Result, train
    from irongrad.training.mlflow import MLflow
    from irongrad.training.position import Position, read_position, restore
    from irongrad.training.prefetch import Prefetched
    from irongrad.training.saving import Checkpoints
    from irongrad.training.schedules import Schedule
    from irongrad.training.shards import Shards, map_shards, matching
    from irongrad.training.sources import Arrays, Samples, Stream
    from irongrad.training.stop import Stop
    from irongrad.training.tensorboard import TensorBoard
    from irongrad.training.tracker import Tracker
    from irongrad.training.trackio import Trackio

__all__ = [
    "Arrays",
    "Callback",
    "Checkpoints",
    "Evaluation",
    "InOrder",
    "JsonLines",
    "MLflow",
    "Padded",
    "Position",
    "Prefetched",
    "Result",
    "Samples",
    "Schedule",
    "Shards",
    "Stop",
    "Stream",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "evaluate",
    "map_shards",
    "matching",
    "read_position",
    "restore",
    "train",
]

# Imported on first use: `irongrad run` reads .npy files, and needs no more of this.
_HOME = {
    "Arrays": "sources",
    "Callback": "events",
    "Checkpoints": "saving",
    "Evaluation": "evaluation",
    "InOrder": "evaluation",
    "JsonLines": "events",
    "MLflow": "mlflow",
    "Padded": "collate",
    "Position": "position",
    "Prefetched": "prefetch",
    "Result": "loop",
    "Samples": "sources",
    "Schedule": "schedules",
    "Shards": "shards",
    "Stop": "stop",
    "Stream": "sources",
    "TensorBoard": "tensorboard",
    "Tracker": "tracker",
    "Trackio": "trackio",
    "evaluate": "evaluation",
    "map_shards": "shards",
    "matching": "shards",
    "read_position": "position",
    "restore": "position",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'irongrad.training' has no attribute {name!r}")
    return getattr(import_module(f"irongrad.training.{_HOME[name]}"), name)
