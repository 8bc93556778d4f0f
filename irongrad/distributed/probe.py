"""Measure one training step on this machine, for a plan of many."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from irongrad.distributed.local_steps import LocalSteps
from irongrad.distributed.plan import MeasuredStep
from irongrad.distributed.sync_text import sync_of
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import UserError
from irongrad.runtime.golden import Golden
from irongrad.runtime.manifest import Role
from irongrad.runtime.ranks.communicator import Communicator, Request

if TYPE_CHECKING:
    from irongrad.runtime.session import Session

_SECONDS, _FEWEST, _MOST = 3.0, 5, 200  # how long, and how often, the step is repeated


class _Done:
    def test(self) -> bool:
        """See `Request`."""
        return True


class _Recorder:
    """Two ranks of which the other is an equal one; exchanges take no time, and are recorded.

    Attributes:
        rank: the number of this process.
        size: the number of ranks.
        started: for each exchange, when it began and its bytes.
    """

    rank, size = 0, 2

    def __init__(self) -> None:
        self.started: list[tuple[float, int]] = []

    def start_sum(self, array: Array) -> Request:
        """See `Communicator`."""
        self.started.append((time.perf_counter(), array.nbytes))
        array *= 2
        return _Done()

    def start_sum_to(self, array: Array, root: int) -> Request:
        """See `Communicator`."""
        return self.start_sum(array)

    def start_broadcast(self, array: Array, root: int) -> Request:
        """See `Communicator`. With the sum to one rank, which is recorded, it is the all-reduce of a plan."""
        return _Done()

    def wait(self, request: Request) -> None:
        """See `Communicator`."""

    def gather(self, row: Array) -> Array:
        """See `Communicator`."""
        return np.stack([row, row])

    def broadcast(self, array: Array, root: int) -> None:
        """See `Communicator`."""

    def without_lost(self) -> Communicator:
        """See `Communicator`."""
        return self


def measured_step(session: Session, golden: Golden, sync: str) -> MeasuredStep:
    """Repeat a training step for some seconds, and take the medians. The session's state changes.

    Args:
        session: a session that is attached to no ranks.
        golden: the golden values of the artifact, which have the inputs of `train_step`.
        sync: how ranks synchronise, as for `irongrad train`. Where they exchange parameters, a round is measured, too.

    Raises:
        UserError: the artifact has no `train_step`, or its ranks exchange statistics within a step.
        GuardError: the inputs do not fit.
    """
    entry = session.manifest.entry_point("train_step")
    if entry is None:
        raise UserError("a plan is made from one train_step, which this artifact lacks")
    inputs = golden.inputs_of(entry)
    recorder = _Recorder()
    together = sync_of(sync, recorder)
    if session.manifest.statistics and not isinstance(together, LocalSteps):
        raise UserError(
            "a plan does not know how long ranks wait for the statistics of BatchNorm within forward and backward: "
            "plan an artifact that was compiled without sync_batch_norm, and add those waits"
        )
    if session.manifest.exchange or isinstance(together, LocalSteps):
        together.begin(session, {})
    seconds: list[float] = []
    readies: list[list[float]] = []
    session.train_step(**inputs)
    begun = time.perf_counter()
    while len(seconds) < _FEWEST or (time.perf_counter() - begun < _SECONDS and len(seconds) < _MOST):
        recorder.started.clear()
        start = time.perf_counter()
        session.train_step(**inputs)
        seconds.append(time.perf_counter() - start)
        readies.append([at - start for at, _ in recorder.started])
    ready = [statistics.median(column) for column in zip(*readies, strict=True)]
    sizes = [nbytes for _, nbytes in recorder.started]
    averaged = (Role.PARAMETER, Role.BUFFER)
    trained = sum(4 * prod(s.shape) for s in session.manifest.state if s.role in averaged and not s.frozen)
    buckets = tuple(zip(ready, sizes, strict=True))
    of_round = _round(together) if isinstance(together, LocalSteps) else 0.0
    return MeasuredStep(statistics.median(seconds), buckets, of_round, trained, _peak())


def _round(sync: LocalSteps) -> float:
    """The median time of a round between two ranks whose exchange takes no time."""
    seconds = []
    for step in range(_FEWEST):
        begun = time.perf_counter()
        sync.after_step(step, due=True)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _peak() -> int:
    """The peak resident memory of this process, in bytes.

    Linux keeps what `getrusage` says across exec, so a small child of a large process seems large.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
