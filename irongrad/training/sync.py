"""What a training run asks of its ranks; `irongrad.distributed` has the ways to synchronise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from irongrad.runtime.arrays import Array
from irongrad.training.position import Position
from irongrad.training.prefetch import read_ahead
from irongrad.training.sources import Parts, Shuffled, Source

if TYPE_CHECKING:
    from irongrad.runtime.session import Session


class Sync(Protocol):
    """Ranks that train together. All of them run the same loop, each on its own batches."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0; the first writes the checkpoints."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def tensors(self) -> Mapping[str, Array]:
        """What a checkpoint holds beside the state."""

    def begin(self, session: Session, start: Mapping[str, Array]) -> None:
        """Begin a run; `start` is what `tensors` was in the checkpoint that it goes on from."""

    def after_step(self, step: int, *, due: bool) -> None:
        """Synchronise after step `step`, if it is time; `due` if the state is evaluated or written now."""

    def agreed(self, reason: str | None) -> str | None:
        """Why the run stops now, for all ranks alike; None if it goes on."""

    def all_have(self, has: bool) -> bool:
        """Whether every rank has a next batch."""

    def recover(self) -> None:
        """Go on with the ranks that are left."""


class Together:
    """An iterable of batches of this rank's own; an epoch ends as soon as one rank has no further batch."""

    order: Mapping[str, int] | None = None

    def __init__(self, source: Source, sync: Sync) -> None:
        self._source, self._sync = source, sync

    @property
    def steps(self) -> int | None:
        """Unknown, because the ranks' iterables may differ; see `Source`."""
        return None

    def place(self, start: Position) -> tuple[int, int]:
        """Find the place of a position; see `Source`."""
        return self._source.place(start)

    def epoch(self, number: int, start: int) -> Iterator[Parts]:
        """Yield the batches of each step of an epoch; see `Source`."""
        batches = self._source.epoch(number, start)
        while self._sync.all_have((parts := next(batches, None)) is not None):
            assert parts is not None
            yield parts


def dealt(source: Source, sync: Sync, ahead: int) -> Source:
    """Return this rank's part of the samples of `source`, read `ahead` steps in advance.

    An iterable is this rank's part already. The ranks agree on its end in the thread that trains, because all messages
    of a rank have an order.

    Raises:
        GuardError: there are fewer samples than one step of all ranks takes.
    """
    if not isinstance(source, Shuffled):
        return Together(read_ahead(source, ahead), sync)
    source.deal(sync.rank, sync.size)
    return read_ahead(source, ahead)
