"""What an engine has to offer so that ranks can train together: MPI does, NCCL and gloo can."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from irongrad.runtime.arrays import Array


class Request(Protocol):
    """A collective that was started."""

    def test(self) -> bool:
        """Return whether it is complete; it makes progress only here.

        Raises:
            RankLostError: a rank is gone.
        """


class Communicator(Protocol):
    """A group of ranks. All ranks call the same methods in the same order.

    Waiting must not keep a core busy, because the cores compute meanwhile.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of ranks.
    """

    rank: int
    size: int

    def start_sum(self, array: Array) -> Request:
        """Start to replace `array`, of float32 or float64, by its sum over all ranks."""

    def start_sum_to(self, array: Array, root: int) -> Request:
        """As `start_sum`, for the rank `root` alone; the `array` of others is not defined then."""

    def start_broadcast(self, array: Array, root: int) -> Request:
        """Start to overwrite `array` with that of the rank `root`."""

    def wait(self, request: Request) -> None:
        """Wait until a collective is complete.

        Raises:
            RankLostError: a rank is gone.
        """

    def gather(self, row: Array) -> Array:
        """Return the rows of all ranks, in order: an array with one more dimension than `row`.

        Raises:
            RankLostError: a rank is gone.
        """

    def broadcast(self, array: Array, root: int) -> None:
        """Overwrite `array` with that of the rank `root`.

        Raises:
            RankLostError: a rank is gone.
        """

    def without_lost(self) -> Communicator:
        """Return a group of the ranks that are left; every rank of them calls this.

        Raises:
            RankLostError: the engine cannot go on without a rank.
        """


def as_bytes(text: str, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`text` in UTF-8 as `size` bytes: cut, or padded with zeros."""
    raw = text.encode()[:size]
    return np.frombuffer(raw.ljust(size, b"\0"), np.uint8).copy()


def as_text(raw: Array) -> str:
    """The text that `as_bytes` made bytes of."""
    return bytes(raw).rstrip(b"\0").decode(errors="ignore")
