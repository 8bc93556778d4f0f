"""A callback that writes a training run for TensorBoard, with the package tensorboardX (the extra `tensorboard`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from irongrad.runtime.arguments import as_path
from irongrad.runtime.errors import UserError
from irongrad.training.events import Ended, Evaluated, Event, Started, Stepped


class TensorBoard:
    """A callback that writes scalars: `train/…` for each step, `validation/…` for each evaluation, and `rate/…`."""

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

    def __call__(self, event: Event, /) -> None:
        """Write the scalars of a step or of an evaluation."""
        if isinstance(event, Started):
            self.close()
            # TensorBoard hides what an earlier process wrote after the checkpoint, because these steps run again. The
            # files of two runs that begin in one second need names of their own.
            again, suffix = event.step + 1 if event.step else None, f".from-{event.step}"
            self._writer = self._make(self._folder, purge_step=again, filename_suffix=suffix)
        elif isinstance(event, Stepped):
            self._write("train", event.step, {"loss": event.loss, **event.values})
            self._write("rate", event.step, event.rates)
            self._write("pace", event.step, {"samples_per_second": event.samples_per_second})
        elif isinstance(event, Evaluated):
            self._write("validation", event.step, {"loss": event.loss, **event.values})
        elif isinstance(event, Ended):
            self._writer.flush()

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
