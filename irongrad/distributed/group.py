"""What all ways to synchronise share: the ranks, and small agreements between them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import UserError
from irongrad.runtime.ranks.communicator import Communicator, as_bytes, as_text

_TEXT = 80


class Group:
    """The ranks of a run."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    def agreed(self, reason: str | None) -> str | None:
        """Why the run shall stop, for all ranks alike: the reason of the lowest rank that has one."""
        texts = self._ranks.gather(as_bytes(reason or "", _TEXT))
        return next((as_text(row) for row in texts if row.any()), None)

    def all_have(self, has: bool) -> bool:
        """Whether every rank has a next batch."""
        return bool(self._ranks.gather(np.array([has], np.int64)).all())


def refuse_momentum(start: Mapping[str, Array]) -> None:
    """Refuse the momentum of an outer optimizer in a run without one.

    Raises:
        UserError: there is some.
    """
    if start:
        raise UserError(
            "the checkpoint has the momentum of an outer optimizer, which this run would lose: give --sync diloco, or "
            "begin a new run with its state"
        )
