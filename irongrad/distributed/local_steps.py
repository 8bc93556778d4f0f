"""Ranks that train alone for some steps, and then agree on their parameters: for slow networks.

* `local`: the mean of the parameters (local SGD: Stich, "Local SGD converges fast and communicates little", ICLR 2019).
* `diloco`: one step of an outer optimizer, SGD with Nesterov's momentum, whose gradient is the mean of the changes of
  all ranks (`averaging.py`).

The state of the inner optimizers stays with each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from irongrad.distributed.averaging import Nesterov, averaged, check_momentum
from irongrad.distributed.compression import Exact, Sum
from irongrad.distributed.group import Group, refuse_momentum
from irongrad.runtime.arguments import check_whole
from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import OUTER
from irongrad.runtime.manifest import Role
from irongrad.runtime.ranks.communicator import Communicator

if TYPE_CHECKING:
    from irongrad.runtime.session import Session


class LocalSteps(Group):
    """Ranks that agree on their parameters every so many steps, before an evaluation, and before a checkpoint.

    Attributes:
        rounds: how often they agreed so far.
    """

    def __init__(
        self, ranks: Communicator, every: int, outer: Nesterov | None = None, summed: Sum | None = None
    ) -> None:
        """
        Args:
            ranks: the ranks.
            every: the number of steps from one round to the next.
            outer: the outer optimizer; by default the parameters become their mean.
            summed: how the changes are summed; exactly by default.

        Raises:
            UserError: a number is out of its range.
        """
        super().__init__(ranks)
        self._every = check_whole("the number of local steps", every, 1)
        self._outer, self._summed = outer, summed or Exact()
        self.rounds = self._since = 0

    @property
    def nbytes(self) -> int:
        """The bytes that this rank has handed over."""
        return self._summed.nbytes

    @property
    def tensors(self) -> dict[str, Array]:
        """The momentum of the outer optimizer by the names that it has in a checkpoint."""
        return {f"{OUTER}{name}": array for name, array in self._named(self._momentum).items()} if self._outer else {}

    def begin(self, session: Session, start: Mapping[str, Array]) -> None:
        """Give all ranks the state of the first, and remember it.

        Args:
            session: the session; every rank has its own.
            start: the momentum of the outer optimizer with which a run goes on, by the parameter's name.

        Raises:
            ArtifactError: the momentum is that of other parameters.
            UserError: the parameters are not float32, or the momentum has no use in this run.
        """
        self._session = session
        self._specs = averaged(session.manifest)
        self._is_parameter = np.concatenate(
            [np.full(int(np.prod(s.shape)), s.role is Role.PARAMETER) for s in self._specs]
        )
        session.share_state(ranks=self._ranks)
        self._anchor = self._flat(session.state())
        self._momentum = np.zeros_like(self._anchor)
        if start:
            self._restore(start)

    def _restore(self, start: Mapping[str, Array]) -> None:
        if self._outer is None:
            refuse_momentum(start)
        check_momentum(start, self._specs)
        self._momentum = np.concatenate([np.ravel(start[s.name]) for s in self._specs])

    def after_step(self, step: int, *, due: bool) -> None:
        """Count a step; agree on the parameters if it is time, or if a round is `due`."""
        self._since += 1
        if due or self._since >= self._every:
            self._round()

    def agreed(self, reason: str | None) -> str | None:
        """Why the run shall stop, for all ranks alike; asked for between two rounds, there is none."""
        return super().agreed(reason) if self._since == 0 else None

    def recover(self) -> None:
        """Go on with the ranks that are left; what they trained since the last round stays.

        Raises:
            RankLostError: the engine cannot.
        """
        self._ranks = self._ranks.without_lost()

    def _round(self) -> None:
        state = self._session.state()
        change = self._summed(self._ranks, self._flat(state) - self._anchor) / np.float32(self.size)
        if self._outer is not None:
            stepped, self._momentum = self._outer.step(change, self._momentum)
            change = np.where(self._is_parameter, stepped, change)
        self._anchor = self._anchor + change
        self._session.update_state(self._named(self._anchor))
        self.rounds += 1
        self._since = 0

    def _flat(self, state: Mapping[str, Array]) -> Array:
        return np.concatenate([np.ravel(state[s.name]) for s in self._specs])

    def _named(self, flat: Array) -> dict[str, Array]:
        sizes = [int(np.prod(s.shape)) for s in self._specs]
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return {s.name: part.reshape(s.shape) for s, part in zip(self._specs, parts, strict=True)}
