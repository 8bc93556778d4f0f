"""What callbacks for tools that record runs have in common: the numbers, and when a record begins and ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from irongrad.training.events import Ended, Evaluated, Event, Started, Stepped


class Tracker(ABC):
    """A callback that records numbers by name: `train/…` and `rate/…` for each step, `validation/…` for evaluations."""

    def __call__(self, event: Event, /) -> None:
        """Record the numbers of a step or of an evaluation."""
        if isinstance(event, Started):
            self.close()
            self._begin(event)
        elif isinstance(event, Stepped | Evaluated):
            self._write(event.step, numbers_of(event))
        elif isinstance(event, Ended):
            self._flush()

    @abstractmethod
    def _begin(self, started: Started) -> None:
        """Begin a record."""

    @abstractmethod
    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record the numbers of a step."""

    @abstractmethod
    def _flush(self) -> None:
        """Hand over what is not recorded yet."""

    @abstractmethod
    def close(self) -> None:
        """End the record; does nothing if there is none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def numbers_of(event: Stepped | Evaluated) -> dict[str, float]:
    """Return the numbers of a step or of an evaluation by their names in a record."""
    means = {"loss": event.loss, **event.values}
    if isinstance(event, Evaluated):
        return {f"validation/{name}": value for name, value in means.items()}
    return {
        **{f"train/{name}": value for name, value in means.items()},
        **{f"rate/{name}": value for name, value in event.rates.items()},
        "pace/samples_per_second": event.samples_per_second,
    }
