"""A callback that writes a training run for TensorBoard, with the package tensorboardX (the extra `tensorboard`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from irongrad.runtime.arguments import as_path
from irongrad.runtime.errors import UserError
from irongrad.training.events import Started
from irongrad.training.tracker import Tracker


class TensorBoard(Tracker):
    """A callback that writes event files of scalars."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """
        Args:
            folder: the folder of event files that `tensorboard --logdir` reads.

        Raises:
            UserError: the package tensorboardX is missing.
        """
        self._folder = str(as_path(folder, "a folder of TensorBoard"))
        try:
            import tensorboardX
        except ModuleNotFoundError:
            raise UserError("TensorBoard needs the package tensorboardX: pip install 'irongrad[tensorboard]'") from None
        self._make = tensorboardX.SummaryWriter
        self._writer: Any = None

    def _begin(self, started: Started) -> None:
        # TensorBoard hides what an earlier process wrote after the checkpoint, because these steps run again. The files
        # of two runs that begin in one second need names of their own.
        again, suffix = started.step + 1 if started.step else None, f".from-{started.step}"
        self._writer = self._make(self._folder, purge_step=again, filename_suffix=suffix)

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()
