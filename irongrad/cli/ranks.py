"""A command that several ranks run at once: what all of them say is said once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from irongrad.runtime.errors import GuardError, IronGradError, NonFiniteError, UserError
from irongrad.runtime.ranks.communicator import Communicator, as_bytes, as_text
from irongrad.runtime.ranks.mpi import MpiCommunicator

_TEXT = 1000
Made = TypeVar("Made")


class SaidElsewhereError(IronGradError):
    """Another rank ends the command and says why; this one ends, too, and says nothing.

    Attributes:
        exit_code: that of the other rank's error.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def world() -> Communicator:
    """The ranks that mpirun started; one without mpirun.

    Raises:
        UserError: MPI is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"--sync needs MPI ({error}): pip install 'irongrad[mpi]', and start the command with mpirun -n RANKS"
        ) from error
    return MpiCommunicator(MPI.COMM_WORLD)


def on_all(ranks: Communicator, make: Callable[[], Made]) -> Made:
    """Run `make` on every rank; if it fails on one of them, all ranks end.

    Raises:
        IronGradError: this rank's own error, if no lower rank has the same; the others raise `SaidElsewhereError`.
    """
    made: Made | None = None
    error: IronGradError | None = None
    try:
        made = make()
    except IronGradError as found:
        error = found
    own = as_bytes("" if error is None else f"{error.exit_code} {error}", _TEXT)
    texts = [as_text(row) for row in ranks.gather(own)]
    if not any(texts):
        assert made is not None
        return made
    mine = texts[ranks.rank]
    if error is not None and texts.index(mine) == ranks.rank:
        raise error if len(set(texts)) == 1 else type(error)(f"rank {ranks.rank}: {error}")
    raise SaidElsewhereError(int(next(filter(None, texts)).partition(" ")[0]))


@contextmanager
def common_errors_said_once(ranks: Communicator) -> Iterator[None]:
    """Run a block whose steps all ranks take together, so that all have its refusals: the first rank says them.

    Raises:
        IronGradError: the block's own error; on the other ranks `SaidElsewhereError` for a refusal.
    """
    try:
        yield
    except (GuardError, NonFiniteError) as error:
        if ranks.rank == 0:
            raise
        raise SaidElsewhereError(error.exit_code) from error
