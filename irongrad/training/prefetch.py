"""Read the batches of the next steps while a step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from irongrad.runtime.arguments import check_whole
from irongrad.training.position import Position
from irongrad.training.sources import Parts, Source


def read_ahead(source: Source, ahead: int) -> Source:
    """Return `source`, read `ahead` steps in advance; as it is for 0."""
    return Prefetched(source, ahead) if ahead else source


class Prefetched:
    """The batches of another source, read by a thread of their own, in the same order.

    Beside the batches of the running step, those of `ahead` steps are in memory. What the source raises is raised at
    the step whose batches it could not read.
    """

    def __init__(self, source: Source, ahead: int = 2) -> None:
        """
        Args:
            source: where the batches come from.
            ahead: the number of steps whose batches are read in advance.

        Raises:
            UserError: `ahead` is no whole number of 1 or more.
        """
        self._source, self._ahead = source, check_whole("prefetch", ahead, 1)

    @property
    def steps(self) -> int | None:
        """The number of steps in an epoch; see `Source`."""
        return self._source.steps

    @property
    def order(self) -> Mapping[str, int] | None:
        """What the order of the samples depends on; see `Source`."""
        return self._source.order

    def place(self, start: Position) -> tuple[int, int]:
        """Find the place of a position; see `Source`."""
        return self._source.place(start)

    def epoch(self, number: int, start: int) -> Iterator[Parts]:
        """Yield the batches of each step of an epoch; see `Source`."""
        batches = self._source.epoch(number, start)
        with ThreadPoolExecutor(1, "irongrad-prefetch") as reader:
            reading: deque[Future[Parts | None]] = deque(reader.submit(next, batches, None) for _ in range(self._ahead))
            try:
                while (parts := reading.popleft().result()) is not None:
                    reading.append(reader.submit(next, batches, None))
                    yield parts
            finally:
                for later in reading:
                    later.cancel()
