"""Ranks over MPI, by mpi4py (https://mpi4py.readthedocs.io), with Open MPI or MPICH.

All collectives are nonblocking ones that are polled with short sleeps. Open MPI's blocking calls spin on a core, which
then computes half as fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import RankLostError
from irongrad.runtime.ranks.communicator import Communicator, Request

# The seconds between two looks at a collective: they grow, so that a long wait costs nothing.
_FIRST_SLEEP, _LONGEST_SLEEP = 2e-5, 5e-4


def is_mpi(value: object) -> bool:
    """Whether `value` is a communicator of mpi4py."""
    return any(c.__module__ == "mpi4py.MPI" and c.__name__ == "Comm" for c in type(value).__mro__)


class MpiRequest:
    """A collective of MPI that was started."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def test(self) -> bool:
        """See `Request`."""
        return bool(_checked(self._request.Test))


class MpiCommunicator:
    """The ranks of an MPI communicator, which is duplicated, so that its own messages stay apart.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of ranks.
    """

    def __init__(self, communicator: Any) -> None:
        self._given = communicator
        self._own = communicator.Dup()
        self.rank, self.size = int(self._own.rank), int(self._own.size)

    def start_sum(self, array: Array) -> MpiRequest:
        """See `Communicator`."""
        from mpi4py import MPI

        return MpiRequest(_checked(lambda: self._own.Iallreduce(MPI.IN_PLACE, array, MPI.SUM)))

    def start_sum_to(self, array: Array, root: int) -> MpiRequest:
        """See `Communicator`."""
        from mpi4py import MPI

        given, taken = (MPI.IN_PLACE, array) if self.rank == root else (array, None)
        return MpiRequest(_checked(lambda: self._own.Ireduce(given, taken, MPI.SUM, root)))

    def start_broadcast(self, array: Array, root: int) -> MpiRequest:
        """See `Communicator`."""
        return MpiRequest(_checked(lambda: self._own.Ibcast(array, root)))

    def wait(self, request: Request) -> None:
        """See `Communicator`."""
        seconds = _FIRST_SLEEP
        while not request.test():
            time.sleep(seconds)
            seconds = min(seconds * 1.5, _LONGEST_SLEEP)

    def gather(self, row: Array) -> Array:
        """See `Communicator`."""
        rows = np.empty((self.size, *row.shape), row.dtype)
        self.wait(MpiRequest(_checked(lambda: self._own.Iallgather(row, rows))))
        return rows

    def broadcast(self, array: Array, root: int) -> None:
        """See `Communicator`."""
        self.wait(self.start_broadcast(array, root))

    def start_send(self, array: Array, rank: int, tag: int) -> MpiRequest:
        """Start to send the bytes of a contiguous `array`, which stays as it is until the request is complete."""
        return MpiRequest(_checked(lambda: self._own.Isend(array.reshape(-1).view(np.uint8), rank, tag)))

    def receive(self, array: Array, rank: int, tag: int) -> None:
        """Overwrite a contiguous `array` with the bytes of the next one that `rank` sends under `tag`."""
        self.wait(MpiRequest(_checked(lambda: self._own.Irecv(array.reshape(-1).view(np.uint8), rank, tag))))

    def without_lost(self) -> Communicator:
        """See `Communicator`. Needs ULFM: `mpirun --with-ft ulfm` (User Level Failure Mitigation, MPI Forum)."""
        try:
            self._own.Revoke()  # ranks that still wait get an error, too
            return MpiCommunicator(self._own.Shrink())
        except (NotImplementedError, AttributeError) as error:
            raise RankLostError(
                "a rank is gone, and this MPI cannot go on without it: start it with fault tolerance, with Open MPI as "
                "mpirun --with-ft ulfm"
            ) from error


def _checked(call: Callable[[], Any]) -> Any:
    """Call MPI; an error of MPI means that a rank is gone."""
    from mpi4py import MPI

    try:
        return call()
    except MPI.Exception as error:
        raise RankLostError(f"a rank is gone: {error}") from error
