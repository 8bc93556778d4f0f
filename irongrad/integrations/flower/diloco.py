"""`DiLoCo` as a strategy of Flower: the server takes a step of an outer optimizer in each round."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from irongrad.distributed.averaging import Nesterov, averaged
from irongrad.runtime.arguments import as_path
from irongrad.runtime.arrays import Array
from irongrad.runtime.manifest import Role
from irongrad.runtime.manifest_file import read_manifest

_PAPERS = Nesterov()


class DiLoCo(FedAvg):
    """The mean of the clients' changes is the gradient of an outer optimizer, as in `irongrad train --sync diloco`.

    The mean is weighted as that of FedAvg is, by the numbers of samples that the clients trained on. Buffers, such as
    BatchNorm's statistics, become their mean. Each client keeps the state of its inner optimizer.

    Attributes:
        momentum: that of the outer optimizer by name; empty before the first round.
    """

    def __init__(self, artifact: str | os.PathLike[str], outer: Nesterov = _PAPERS, **options: Any) -> None:
        """
        Args:
            artifact: the directory of the artifact.
            outer: the outer optimizer; the paper's by default.
            options: those of FedAvg.

        Raises:
            ArtifactError: the artifact is missing or damaged.
            UserError: its parameters are not of float32.
        """
        super().__init__(**options)
        specs = averaged(read_manifest(as_path(artifact, "the directory of an artifact")))
        self._outer = outer
        self._parameters = {s.name for s in specs if s.role is Role.PARAMETER}
        self.momentum: Mapping[str, Array] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember what the clients begin with, and choose them as FedAvg does."""
        self._anchor = {name: array.numpy() for name, array in arrays.items()}
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take a step of the outer optimizer with the mean of the clients' changes."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, metrics
        moved = {name: self._moved(name, array.numpy()) for name, array in mean.items()}
        self.momentum = {name: momentum for name, (_, momentum) in moved.items()}
        return ArrayRecord({name: FlowerArray(array) for name, (array, _) in moved.items()}), metrics

    def _moved(self, name: str, mean: Array) -> tuple[Array, Array]:
        """A tensor after the step, and its momentum."""
        anchor = self._anchor[name]
        before = self.momentum.get(name, np.zeros_like(anchor))
        stepped, momentum = self._outer.step(mean - anchor, before)
        return (anchor + stepped if name in self._parameters else mean), momentum
