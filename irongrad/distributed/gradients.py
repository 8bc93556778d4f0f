"""Synchronous data parallelism: every step is one step of all ranks, which exchange their gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from irongrad.distributed.group import Group, refuse_momentum
from irongrad.runtime.arguments import check_whole
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import UserError
from irongrad.runtime.ranks.communicator import Communicator

if TYPE_CHECKING:
    from irongrad.runtime.session import Session


class Gradients(Group):
    """Ranks that exchange gradients in every step, inside the compiled step; see `Session.attach`.

    Attributes:
        tensors: what a checkpoint holds beside the state: nothing.
    """

    tensors: Mapping[str, Array] = {}

    def __init__(self, ranks: Communicator, check_every: int = 1000) -> None:
        """
        Args:
            ranks: the ranks.
            check_every: the number of steps from one comparison of the state of all ranks to the next.

        Raises:
            UserError: a number is out of its range.
        """
        super().__init__(ranks)
        self._check_every = check_whole("check_every", check_every, 1)

    def begin(self, session: Session, start: Mapping[str, Array]) -> None:
        """Attach the session to the ranks.

        Raises:
            UserError: the artifact was compiled without `communicate`, the ranks have different artifacts, or the
                checkpoint is from a run with an outer optimizer.
        """
        refuse_momentum(start)
        self._session = session
        session.attach(self._ranks)

    def after_step(self, step: int, *, due: bool) -> None:
        """Compare the state of all ranks from time to time, and where `due`."""
        if due or step % self._check_every == 0:
            check_equal(self._session, self._ranks)

    def recover(self) -> None:
        """Go on with the ranks that are left.

        Raises:
            RankLostError: the engine cannot.
        """
        self._ranks = self._session.recover()


def check_equal(session: Session, ranks: Communicator) -> None:
    """Compare the state of all ranks, bit for bit; every rank calls this.

    Raises:
        UserError: they differ; the message has the first tensor.
    """
    state = session.state()
    names = [s.name for s in session.manifest.state]
    mine = np.stack([np.frombuffer(hashlib.sha256(state[n].tobytes()).digest(), np.int64) for n in names])
    all_of_them = ranks.gather(mine)
    different = (all_of_them != all_of_them[0]).any(axis=2)
    if different.any():
        rank, tensor = (int(i) for i in np.argwhere(different)[0])
        raise UserError(
            f"the state of rank {rank} differs from that of rank 0, first in {names[tensor]!r}: the ranks compute on "
            "different hardware, or one of them changed its state. Begin again from the last checkpoint"
        )
