"""Ranks that train alone for some steps, and then agree on their parameters: for slow networks.

* `local`: the mean of the parameters (local SGD: Stich, "Local SGD converges fast and communicates little", ICLR 2019).
* `diloco`: one step of an outer optimizer, SGD with Nesterov's momentum, whose gradient is the mean of the changes of
  all ranks (Douillard et al., "DiLoCo: Distributed low-communication training of language models", arXiv:2311.08105).

The state of the inner optimizers stays with each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from irongrad.distributed.compression import Exact, Sum
from irongrad.distributed.group import agreed_reason, all_have
from irongrad.runtime.arguments import check_whole
from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import OUTER
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest import Role
from irongrad.runtime.ranks.communicator import Communicator

if TYPE_CHECKING:
    from irongrad.runtime.session import Session


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo; the defaults are the paper's.

    Attributes:
        rate: its learning rate.
        momentum: its momentum.
    """

    rate: float = 0.7
    momentum: float = 0.9


class LocalSteps:
    """Ranks that agree on their parameters every so many steps, before an evaluation, and before a checkpoint.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of ranks.
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
        self._ranks, self._every = ranks, check_whole("the number of local steps", every, 1)
        self._outer, self._summed = outer, summed or Exact()
        self.rank, self.size = ranks.rank, ranks.size
        self.rounds = self._since = 0
        self._at_boundary = False

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
        specs = [s for s in session.manifest.state if not s.frozen and s.dtype.startswith(("float", "bfloat"))]
        self._specs = [s for s in specs if s.role in (Role.PARAMETER, Role.BUFFER)]
        if other := [s for s in self._specs if s.dtype != "float32"]:
            raise UserError(f"{other[0].name} is of {other[0].dtype}; only parameters of float32 can be averaged")
        self._is_parameter = np.concatenate(
            [np.full(int(np.prod(s.shape)), s.role is Role.PARAMETER) for s in self._specs]
        )
        self._share_all()
        self._anchor = self._flat()
        self._momentum = np.zeros_like(self._anchor)
        if start:
            self._restore(start)

    def _restore(self, start: Mapping[str, Array]) -> None:
        if self._outer is None:
            raise UserError(
                "the checkpoint has the momentum of an outer optimizer, which this run would lose: give --sync diloco, "
                "or begin a new run with its state"
            )
        if {n: a.shape for n, a in start.items()} != {s.name: s.shape for s in self._specs}:
            raise ArtifactError("the outer momentum in the checkpoint is that of other parameters; take only its state")
        self._momentum = np.concatenate([np.ravel(start[s.name]) for s in self._specs])

    def after_step(self, step: int, *, due: bool) -> None:
        """Count a step; agree on the parameters if it is time, or if a round is `due`."""
        self._since += 1
        self._at_boundary = due or self._since >= self._every
        if self._at_boundary:
            self._round()

    def agreed(self, reason: str | None) -> str | None:
        """Why the run shall stop, for all ranks alike; asked for between two rounds, there is none."""
        return agreed_reason(self._ranks, reason) if self._at_boundary else None

    def all_have(self, has: bool) -> bool:
        """Whether every rank has a next batch."""
        return all_have(self._ranks, has)

    def recover(self) -> None:
        """Go on with the ranks that are left; what they trained since the last round stays.

        Raises:
            RankLostError: the engine cannot.
        """
        self._ranks = self._ranks.without_lost()
        self.rank, self.size = self._ranks.rank, self._ranks.size

    def _round(self) -> None:
        change = self._summed(self._ranks, self._flat() - self._anchor) / np.float32(self.size)
        if self._outer is not None:
            # As torch.optim.SGD with nesterov=True; a change is a gradient with the opposite sign.
            self._momentum = np.float32(self._outer.momentum) * self._momentum + change
            stepped = change + np.float32(self._outer.momentum) * self._momentum
            change = np.where(self._is_parameter, np.float32(self._outer.rate) * stepped, change)
        self._anchor = self._anchor + change
        self._session.load_state(self._session.state() | self._named(self._anchor))
        self.rounds += 1
        self._since = 0

    def _share_all(self) -> None:
        state = self._session.state()
        for spec in self._session.manifest.state:
            array = np.array(state[spec.name], order="C")
            self._ranks.broadcast(array, 0)
            state[spec.name] = array
        self._session.load_state(state)

    def _flat(self) -> Array:
        state = self._session.state()
        return np.concatenate([np.ravel(state[s.name]) for s in self._specs])

    def _named(self, flat: Array) -> dict[str, Array]:
        sizes = [int(np.prod(s.shape)) for s in self._specs]
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return {s.name: part.reshape(s.shape) for s, part in zip(self._specs, parts, strict=True)}
