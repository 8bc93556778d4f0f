"""Compare what several compilers make of one training step, and how long their steps take."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from irongrad.analysis.machine import cpu_name, threads
from irongrad.peers.kernels import Compiled, Totals, grouped
from irongrad.peers.process import PEERS, Peer, Seconds, start
from irongrad.runtime.errors import UserError
from irongrad.step.train_step import TrainStep

FORMAT_VERSION = 1
_SECONDS = 0.3  # of each round of a compiler


@dataclass(frozen=True)
class Column:
    """One compiler.

    Attributes:
        compiled: what it made of the step.
        least_seconds: of one step, the least of the rounds.
        median_seconds: of one step, the median of the rounds.
        cpu_seconds: of all threads in one step, the least of the rounds.
        ratio: of its time to IronGrad's, the median of the rounds' own ratios; None without IronGrad.
    """

    compiled: Compiled
    least_seconds: float
    median_seconds: float
    cpu_seconds: float
    ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """Compilers on one step.

    Attributes:
        format_version: the version of this format.
        machine: the CPU's name.
        threads: how many threads each compiler may use.
        load: the mean number of running processes in the last minute, before and after the rounds. With nothing else
            on the machine it is at most the number of threads.
        columns: the compilers.
        missing: why a compiler has no column, by its name.
    """

    format_version: int
    machine: str
    threads: int
    load: tuple[float, float]
    columns: tuple[Column, ...]
    missing: dict[str, str]

    def column(self, peer: str) -> Column | None:
        """The column of a compiler."""
        return next((c for c in self.columns if c.compiled.peer == peer), None)


@dataclass(frozen=True)
class Difference:
    """The kernels of one phase and one kind of layer, by each compiler.

    Attributes:
        phase: `forward`, `backward` or `update`.
        layer: the class of the modules.
        totals: the sums, by compiler.
    """

    phase: str
    layer: str
    totals: dict[str, Totals]


def compare(
    load: Callable[[], TrainStep],
    peers: Sequence[str] = PEERS,
    *,
    one_thread: bool = False,
    rounds: int = 7,
    say: Callable[[str], object] = lambda text: None,
) -> Comparison:
    """Compile a step with several compilers, each in a process of its own, and time their steps in turn.

    Args:
        load: makes the step; it must be importable in other processes.
        peers: which compilers.
        one_thread: whether the steps run on one thread each.
        rounds: how often each is timed.
        say: called with what runs next.

    Raises:
        UserError: no compiler could compile the step.
    """
    running: list[Peer] = []
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for number, name in enumerate(peers, 1):
                say(f"{name} compiles ({number} of {len(peers)})")
                folder = Path(scratch) / name
                folder.mkdir()
                try:
                    running.append(start(name, load, folder, one_thread=one_thread))
                except UserError as error:
                    missing[name] = str(error)
            if not running:
                raise UserError("; ".join(f"{name}: {why}" for name, why in missing.items()))
            before = os.getloadavg()[0]
            times = _times(running, rounds, say)
            busy = before, os.getloadavg()[0]
        finally:
            for peer in running:
                peer.end()
    own = times.get(PEERS[0])
    columns = tuple(_column(peer.compiled, times[peer.name], own) for peer in running)
    return Comparison(FORMAT_VERSION, cpu_name(), 1 if one_thread else threads(), busy, columns, missing)


def differences(comparison: Comparison) -> list[Difference]:
    """The kernels by phase and kind of layer; where the compilers' bytes differ most comes first."""
    groups = {c.compiled.peer: grouped(c.compiled.kernels, lambda k: (k.phase, k.layer)) for c in comparison.columns}
    keys = dict.fromkeys(key for found in groups.values() for key in found)
    rows = [Difference(*key, {peer: found[key] for peer, found in groups.items() if key in found}) for key in keys]
    return sorted(rows, key=_spread, reverse=True)


def _spread(row: Difference) -> int:
    sizes = [totals.nbytes for totals in row.totals.values()]
    return max(sizes) - min(sizes)


def _times(running: Sequence[Peer], rounds: int, say: Callable[[str], object]) -> dict[str, list[Seconds]]:
    counts = {peer.name: max(2, int(_SECONDS / peer.seconds_of(3).wall)) for peer in running}
    times: dict[str, list[Seconds]] = {peer.name: [] for peer in running}
    for number in range(1, rounds + 1):
        say(f"steps in turn, round {number} of {rounds}")
        for peer in running:
            times[peer.name].append(peer.seconds_of(counts[peer.name]))
    return times


def _column(compiled: Compiled, times: list[Seconds], own: list[Seconds] | None) -> Column:
    walls = [t.wall for t in times]
    ratio = statistics.median(t / o.wall for t, o in zip(walls, own, strict=True)) if own else None
    return Column(compiled, min(walls), statistics.median(walls), min(t.cpu for t in times), ratio)
