"""Where the batches of a training run come from, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from irongrad.runtime.arguments import check_whole
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError, UserError
from irongrad.training.means import Batch
from irongrad.training.position import Position

# The batches of one step: one, or several whose gradients are accumulated.
Parts: TypeAlias = Sequence[Batch]


@runtime_checkable
class Source(Protocol):
    """The batches of a training run.

    Attributes:
        steps: the number of steps in an epoch; None if it is not known before the epoch ends.
        order: what the order of the samples depends on beside the epoch, for the record in a checkpoint; None if the
            source does not know.
    """

    @property
    def steps(self) -> int | None:
        """The number of steps in an epoch."""

    @property
    def order(self) -> Mapping[str, int] | None:
        """What the order of the samples depends on."""

    def place(self, start: Position) -> tuple[int, int]:
        """Return the epoch, and the number of its steps that are over, at which a run goes on.

        Raises:
            GuardError: the run stopped inside an epoch of other data, or of another order.
        """

    def epoch(self, number: int, start: int) -> Iterator[Parts]:
        """Yield the batches of each step of an epoch, from step `start` of the epoch on."""


class Shuffled(ABC):
    """Samples that are numbered, in batches of one size; samples that do not fill the last step are left out."""

    def __init__(self, samples: int, batch: int, accumulate: int, seed: int) -> None:
        """
        Raises:
            GuardError: there are fewer samples than a step takes.
            UserError: a number is out of its range.
        """
        self.samples, self.batch = samples, check_whole("batch", batch, 1)
        self.accumulate, self.seed = check_whole("accumulate", accumulate, 1), check_whole("seed", seed)
        self._offset = 0
        self.deal(0, 1)

    def deal(self, rank: int, ranks: int) -> None:
        """Take part `rank` of `ranks` equal parts of each step's samples; a step then has so many times more of them.

        Raises:
            GuardError: there are fewer samples than a step takes.
        """
        self._rank, self._ranks = rank, ranks
        self._in_step = self.batch * self.accumulate * ranks
        self.steps = self.samples // self._in_step
        if not self.steps:
            parts = f" for each of {ranks} ranks" if ranks > 1 else ""
            raise GuardError(
                f"the data has {self.samples} samples, fewer than one batch of {self.batch * self.accumulate}{parts}"
            )

    @property
    def order(self) -> Mapping[str, int]:
        """The seed, the sizes, and by how many steps each epoch begins late."""
        sizes = {"samples": self.samples, "batch": self.batch, "accumulate": self.accumulate}
        ranks = {"ranks": self._ranks} if self._ranks > 1 else {}
        return {"seed": self.seed, **sizes, **ranks, "offset": self._offset}

    def place(self, start: Position) -> tuple[int, int]:
        """Find the place of a position; see `Source`.

        A run of another batch size, or one whose checkpoint records no place, goes on at its number of steps. One with
        another number of ranks goes on at the first of its steps whose samples are all new.
        """
        self._offset = 0 if start.order is None else start.order.get("offset", 0)
        if start.order == self.order and start.epoch is not None and start.batch < self.steps:
            return start.epoch, start.batch
        if start.order is not None and start.epoch is not None and self._differs_in_ranks(start.order):
            seen = start.batch * _step_size(start.order)
            return divmod(start.epoch * self.steps + min(-(-seen // self._in_step), self.steps), self.steps)
        if start.batch:
            was = ", ".join(f"{name} {value}" for name, value in (start.order or {}).items() if name != "offset")
            now = ", ".join(f"{name} {value}" for name, value in self.order.items() if name != "offset")
            raise GuardError(
                f"the checkpoint is from the middle of an epoch of other data or another order ({was or 'unknown'}), "
                f"and this is {now}: resume with the same data, or begin a new run with its state"
            )
        epoch, self._offset = divmod(start.step, self.steps)
        return epoch, 0

    def epoch(self, number: int, start: int) -> Iterator[Parts]:
        """Yield the batches of each step of an epoch; see `Source`."""
        first = number * self.steps + self._offset
        for index in range(first + start, first + self.steps):
            epoch, place = divmod(index, self.steps)
            rows = self._rows(epoch, place * self._in_step, (place + 1) * self._in_step)
            mine = rows.reshape(self._ranks, self.accumulate, self.batch)[self._rank]
            yield [self._read(part) for part in mine]

    def _differs_in_ranks(self, order: Mapping[str, int]) -> bool:
        """Whether this run takes the samples of another one, in its order, with another number of ranks."""
        same = all(order.get(name) == self.order[name] for name in ("seed", "samples"))
        return same and order.get("ranks", 1) != self._ranks and order.get("offset", 0) == 0

    @abstractmethod
    def _rows(self, epoch: int, start: int, stop: int) -> Array:
        """The numbers of the samples from place `start` to `stop` of an epoch's order."""

    @abstractmethod
    def _read(self, rows: Array) -> Batch:
        """The batch of the samples with these numbers."""


def _step_size(order: Mapping[str, int]) -> int:
    """The samples in a step of all ranks."""
    return order["batch"] * order["accumulate"] * order.get("ranks", 1)


class Permuted(Shuffled):
    """Samples in one permutation an epoch."""

    def __init__(self, samples: int, batch: int, accumulate: int, seed: int) -> None:
        super().__init__(samples, batch, accumulate, seed)
        self._known: tuple[int, Array] | None = None

    def _rows(self, epoch: int, start: int, stop: int) -> Array:
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        return self._known[1][start:stop]


class Arrays(Permuted):
    """The rows of arrays in memory."""

    def __init__(self, arrays: Mapping[str, Array], batch: int, *, accumulate: int = 1, seed: int = 0) -> None:
        """
        Args:
            arrays: the arrays of all samples by the input's name; the first dimension counts samples.
            batch: the number of samples in a call of the step.
            accumulate: the number of calls in one step.
            seed: the seed of the order of the samples.

        Raises:
            GuardError: the arrays differ in length, or are shorter than a step.
            UserError: a number is out of its range.
        """
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        lengths = {name: len(array) if array.ndim else 0 for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{n}: {length}" for n, length in lengths.items())
            raise GuardError(f"the arrays have different numbers of samples ({listed or 'there are none'})")
        super().__init__(next(iter(lengths.values())), batch, accumulate, seed)

    def _read(self, rows: Array) -> Batch:
        return {name: array[rows] for name, array in self._arrays.items()}


# What makes a batch of several samples.
Collate: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], Batch]


class Samples(Permuted):
    """The samples of a data set that has a length and gives a dictionary for an index, such as one of Hugging Face."""

    def __init__(
        self, data: Any, batch: int, *, collate: Collate | None = None, accumulate: int = 1, seed: int = 0
    ) -> None:
        """
        Args:
            data: the data set: `len(data)` samples, `data[i]` is a dictionary by the input's name.
            batch: the number of samples in a call of the step.
            collate: makes a batch of a list of samples; by default it stacks them.
            accumulate: the number of calls in one step.
            seed: the seed of the order of the samples.

        Raises:
            GuardError: there are fewer samples than a step takes.
            UserError: the data has no length or no items, or a number is out of its range.
        """
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise UserError(f"{type(data).__name__} has no length or no items; give an iterable of batches instead")
        super().__init__(len(data), batch, accumulate, seed)
        self._data, self._collate = data, collate or stacked

    def _read(self, rows: Array) -> Batch:
        if callable(several := getattr(self._data, "__getitems__", None)):  # as a DataLoader asks a data set
            return self._collate(several(rows.tolist()))
        return self._collate([self._data[row] for row in rows.tolist()])


def stacked(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack samples along a new first dimension.

    Raises:
        GuardError: they have different shapes.
    """
    batch = {}
    for name in samples[0]:
        try:
            batch[name] = np.stack([np.asarray(sample[name]) for sample in samples])
        except (ValueError, KeyError) as error:
            raise GuardError(
                f"{name}: the samples of a batch differ ({error}); give a collate function, such as Padded"
            ) from None
    return batch


class Stream:
    """An iterable of batches in its own order, such as a DataLoader.

    Before each epoch, `set_epoch` is called with its number if the iterable, its sampler or its batch sampler has such
    a method. A resumed run passes over the batches that were trained already.
    """

    order: Mapping[str, int] | None = None

    def __init__(self, batches: Iterable[Batch], *, accumulate: int = 1) -> None:
        """
        Args:
            batches: dictionaries of arrays by the input's name.
            accumulate: the number of batches in one step; those that do not fill the last step are left out.

        Raises:
            UserError: `batches` is no iterable of batches, or a number is out of its range.
        """
        if isinstance(batches, str | bytes | Mapping) or not isinstance(batches, Iterable):
            raise UserError(f"the data is a {type(batches).__name__}; it must be an iterable of dictionaries of arrays")
        self._batches, self._accumulate = batches, check_whole("accumulate", accumulate, 1)
        self._begun = False

    @property
    def steps(self) -> int | None:
        """The number of steps in an epoch; None if the iterable has no length."""
        try:
            return len(self._batches) // self._accumulate  # type: ignore[arg-type]
        except TypeError:  # also from a DataLoader over an iterable data set
            return None

    def place(self, start: Position) -> tuple[int, int]:
        """Find the place of a position; see `Source`."""
        if start.epoch is not None:
            return start.epoch, start.batch
        return divmod(start.step, self.steps) if self.steps else (0, 0)

    def epoch(self, number: int, start: int) -> Iterator[Parts]:
        """Yield the batches of each step of an epoch; see `Source`."""
        for part in (self._batches, *(getattr(self._batches, n, None) for n in ("sampler", "batch_sampler"))):
            if callable(announce := getattr(part, "set_epoch", None)):
                announce(number)
        iterator = iter(self._batches)
        if iterator is self._batches and self._begun:
            raise UserError("the data is an iterator, which can be read once; give an iterable, such as a list")
        self._begun = True
        skipped = start * self._accumulate
        if sum(1 for _ in islice(iterator, skipped)) < skipped:
            raise GuardError(f"the checkpoint is from after {start} steps of an epoch, and the data has fewer")
        while len(parts := list(islice(iterator, self._accumulate))) == self._accumulate:
            if not isinstance(parts[0], Mapping):
                raise GuardError(f"the data yields a {type(parts[0]).__name__}; it must yield dictionaries of arrays")
            yield parts


def source_of(data: Any, accumulate: int = 1) -> Source:
    """Return `data` as a source: one as it is, an iterable of batches as a `Stream`.

    Raises:
        UserError: it is neither; or batches of a source are to be accumulated, which is the source's own setting.
    """
    if not isinstance(data, Source):
        return Stream(data, accumulate=accumulate)
    if accumulate != 1:
        raise UserError(f"give accumulate to {type(data).__name__}, which makes the batches")
    return data
