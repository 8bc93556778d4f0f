"""What a training run tells its callbacks, and the callback that writes it as lines of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from irongrad.runtime.arguments import as_path


@dataclass(frozen=True)
class Started:
    """Training begins.

    Attributes:
        step: the number of steps of the run so far.
        epoch: the number of whole epochs so far.
        batch: the number of steps so far in the epoch that has begun.
        last: the number of steps at which training ends; None if it is not known.
        per_epoch: the number of steps in an epoch; None if it is not known.
    """

    step: int
    epoch: int
    batch: int
    last: int | None
    per_epoch: int | None


@dataclass(frozen=True)
class Stepped:
    """A step has run.

    Attributes:
        step: the number of steps of the run so far.
        epoch: the epoch, from 0 on.
        loss: the loss before the update; the mean over accumulated batches.
        values: the values beside the loss.
        rates: the learning rate of each parameter group by the name of its hyperparameter.
        samples: the number of samples in the step.
        seconds: the time of the step, that of its data included.
    """

    step: int
    epoch: int
    loss: float
    values: Mapping[str, float]
    rates: Mapping[str, float]
    samples: int
    seconds: float

    @property
    def samples_per_second(self) -> float:
        """The number of samples in a second."""
        return self.samples / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Evaluated:
    """The held-out data was evaluated.

    Attributes:
        step: the number of steps of the run so far.
        epoch: the epoch, from 0 on.
        loss: the mean loss.
        values: the means of the values beside the loss.
        best: whether this is the best evaluation so far.
    """

    step: int
    epoch: int
    loss: float
    values: Mapping[str, float]
    best: bool


@dataclass(frozen=True)
class EpochEnded:
    """An epoch has ended, or training has ended in the middle of one.

    Attributes:
        step: the number of steps of the run so far.
        epoch: the epoch, from 0 on.
        loss: the mean loss of the steps of the epoch that this process ran.
        values: the means of the values beside the loss.
        evaluated: the evaluation at the end of the epoch; None if there was none.
        whole: whether the epoch's data was seen to its end.
    """

    step: int
    epoch: int
    loss: float
    values: Mapping[str, float]
    evaluated: Evaluated | None
    whole: bool


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written.

    Attributes:
        step: the number of steps of the run so far.
        paths: the files that are new.
    """

    step: int
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Ended:
    """Training has ended.

    Attributes:
        step: the number of steps of the run so far.
        reason: why: `complete`, `no improvement`, `SIGTERM`, or the reason of another request to stop.
    """

    step: int
    reason: str


Event: TypeAlias = Started | Stepped | Evaluated | EpochEnded | Saved | Ended


# A function that is called with each event of a training run, in order; what it raises ends the training.
Callback: TypeAlias = Callable[[Event], object]


class JsonLines:
    """A callback that appends one JSON object for each event to a file; a number that is not finite becomes null.

    The key `event` has the name of the event in lower case. A step has `lr`, a number, or numbers by name if there are
    several parameter groups.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Raises:
            OSError: the file cannot be written.
        """
        path = as_path(path, "a log")
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line reaches the system at once, so that a killed run leaves whole lines.
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def __call__(self, event: Event, /) -> None:
        """Write a line."""
        self._file.write(json.dumps(_plain(_line(event)), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(event: Event) -> dict[str, Any]:
    line = {"event": type(event).__name__.lower(), **vars(event)}
    if isinstance(event, Stepped):
        rates = dict(line.pop("rates"))
        line |= {"lr": next(iter(rates.values())) if len(rates) == 1 else rates}
        line |= {"samples_per_second": event.samples_per_second}
    if isinstance(event, EpochEnded):
        del line["evaluated"]  # has a line of its own
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if isinstance(value, bool | int | str) or value is None else str(value)


@dataclass
class Recorder:
    """A callback that keeps the epochs and the evaluations of a run.

    Attributes:
        epochs: the epochs that ended.
        evaluations: the evaluations.
    """

    epochs: list[EpochEnded] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)

    def __call__(self, event: Event, /) -> None:
        """Keep the event, if it is one of these."""
        if isinstance(event, EpochEnded):
            self.epochs.append(event)
        elif isinstance(event, Evaluated):
            self.evaluations.append(event)
