"""Evaluation during training: when, on what, and what becomes of the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Literal

import numpy as np

from irongrad.runtime.arguments import check_whole
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import UserError
from irongrad.training.mapped_rows import MappedRows
from irongrad.training.means import Batch, Reported, mean_of, reported, samples_in
from irongrad.training.position import Position

if TYPE_CHECKING:
    from irongrad.runtime.session import Session


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of held-out data during training.

    Attributes:
        batches: the held-out data, iterated at each evaluation.
        every: the number of steps from one evaluation to the next; None evaluates after each epoch.
        monitor: what is compared: `loss`, or a value that the loss function returns beside it.
        mode: whether the smallest or the largest is best.
        patience: the number of evaluations without improvement after which training stops; None never stops it.
        min_delta: by how much a value must be better to count as an improvement for `patience`.
    """

    batches: Iterable[Batch]
    every: int | None = None
    monitor: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("patience", self.patience)):
            if value is not None:
                check_whole(f"evaluation: {name}", value, 1)
        if self.mode not in ("min", "max"):
            raise UserError(f"evaluation: mode is {self.mode!r:.60}: it must be 'min' or 'max'")
        if not isinstance(self.min_delta, int | float) or not 0 <= self.min_delta < float("inf"):
            raise UserError(f"evaluation: min_delta is {self.min_delta!r:.60}: it must be a number of 0 or more")
        if iter(self.batches) is self.batches:
            raise UserError("evaluation: the batches are an iterator, which can be read once; give a list")


class InOrder:
    """The rows of arrays in batches, in their order, as often as they are iterated."""

    def __init__(self, arrays: Mapping[str, Array] | MappedRows, batch: int, *, partial: bool) -> None:
        """
        Args:
            arrays: arrays by the input's name, whose first dimension counts samples; or such arrays in files.
            batch: the number of samples in a batch.
            partial: whether a last smaller batch is part of them.
        """
        self._arrays, self._batch, self._partial = arrays, batch, partial

    def __iter__(self) -> Iterator[Batch]:
        arrays = self._arrays
        samples = arrays.samples if isinstance(arrays, MappedRows) else len(next(iter(arrays.values())))
        for start in range(0, samples if self._partial else samples // self._batch * self._batch, self._batch):
            stop = min(start + self._batch, samples)
            if isinstance(arrays, MappedRows):
                yield arrays.read(np.arange(start, stop))
            else:
                yield {n: a[start:stop] for n, a in arrays.items()}


def refuse_unknown_monitor(session: Session, evaluation: Evaluation) -> None:
    """Refuse to monitor what the step does not return, before anything is trained.

    Raises:
        UserError: names the values that it returns.
    """
    returned = [output.name for output in session.entry("eval_step").outputs]
    if evaluation.monitor not in returned:
        raise UserError(f"evaluation: there is no value {evaluation.monitor!r}; the step returns {', '.join(returned)}")


def evaluate(session: Session, batches: Iterable[Batch]) -> Reported:
    """Return the mean evaluation loss over all samples, and the means of the values beside it.

    The samples of a smaller batch count as much as the others. Without a batch the loss is NaN.

    Raises:
        GuardError: a batch is not what the step takes.
        UserError: the step has no `eval_step`.
    """
    weights: list[int] = []
    parts: list[Reported] = []
    for batch in batches:
        weights.append(samples_in(batch))
        parts.append(reported(session.eval_step(**batch)))
    return mean_of(parts, weights) if parts else {"loss": float("nan")}


class Monitor:
    """Tells which evaluation is the best so far, and whether training should stop."""

    def __init__(self, evaluation: Evaluation | None, start: Position) -> None:
        self._evaluation = evaluation
        self.best, self.reference, self.waited = start.best, start.reference, start.waited

    def improved(self, means: Reported) -> bool:
        """Take the result of an evaluation; return whether it is the best so far. NaN never is."""
        wanted = self._evaluation
        assert wanted is not None
        value = means[wanted.monitor]
        if self._better(value, self.reference, wanted.min_delta):
            self.reference, self.waited = value, 0
        else:
            self.waited += 1
        better = self._better(value, self.best, 0.0)
        if better:
            self.best = value
        return better

    @property
    def exhausted(self) -> bool:
        """Whether `patience` evaluations in a row brought no improvement."""
        patience = None if self._evaluation is None else self._evaluation.patience
        return patience is not None and self.waited >= patience

    def _better(self, value: float, than: float | None, by: float) -> bool:
        assert self._evaluation is not None
        if isnan(value) or than is None:
            return not isnan(value)
        return value < than - by if self._evaluation.mode == "min" else value > than + by
