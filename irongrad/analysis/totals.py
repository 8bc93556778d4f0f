"""Sums over the record of a compilation: work and memory traffic by operator, module, line, phase and kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from irongrad.analysis.records import Analysis, Launch, Operator, Source, TargetRecord

COPY = "copy"


@dataclass(frozen=True)
class Work:
    """The work of a group of operators, or of launches.

    Attributes:
        name: the group.
        count: how many operators execute, or how many kernels are launched.
        flops: floating-point operations; None if a size is unknown. Of operators, those of products and convolutions
            alone, as PyTorch's `FlopCounterMode` counts them. Of kernels, every arithmetic operation.
        read: the bytes of operands that are read.
        written: the bytes of results that are written.
    """

    name: str
    count: int
    flops: int | None
    read: int
    written: int

    @property
    def nbytes(self) -> int:
        """The bytes that are read and written."""
        return self.read + self.written

    @property
    def intensity(self) -> float | None:
        """The arithmetic intensity: operations for each byte; None if either is unknown."""
        return self.flops / self.nbytes if self.nbytes and self.flops is not None else None

    def __add__(self, other: Work) -> Work:
        flops = None if self.flops is None or other.flops is None else self.flops + other.flops
        read, written = self.read + other.read, self.written + other.written
        return Work(self.name, self.count + other.count, flops, read, written)


@dataclass(frozen=True)
class Executed:
    """A launch as one call of an entry point executes it.

    Attributes:
        launch: the launch.
        times: how often the call executes it.
    """

    launch: Launch
    times: int

    def work(self, target: TargetRecord, name: str) -> Work:
        """Its work, under `name`; that of a copy has no operations."""
        launch, times = self.launch, self.times
        operations = 0 if launch.kernel is None else target.kernels[launch.kernel].operations
        flops = None if operations is None else times * operations
        return Work(name, times, flops, times * launch.read, times * launch.written)


def operators_of(analysis: Analysis, entry: str) -> list[tuple[Operator, Source, int]]:
    """The operators that one step of an entry point executes, as captured, each with its source and how often.

    There are none if the step came from another compiler, such as JAX.
    """
    chain = analysis.chains.get(entry, ())
    rows = ((operator, analysis.sources[operator.source]) for operator in analysis.operators)
    return [(o, s, o.times * chain.count(s.function)) for o, s in rows if s.function in chain]


def executed(target: TargetRecord, entry: str) -> list[Executed]:
    """The launches that one call of an entry point executes, in program order of each function.

    The launches of functions that it calls come after its own. A call of the example's own sizes is meant: the launches
    of other buckets, and of functions of any size beside buckets, do not count. All branches of the model's own do.
    """
    return list(_executed(target, entry, 1))


def _executed(target: TargetRecord, function: str, times: int) -> Iterator[Executed]:
    own = (launch for launch in target.launches if launch.function == function)
    yield from (Executed(x, times * x.times) for x in own if not _is_of_other_sizes(target, x))
    called = target.calls.get(function, ())
    for name in (name for name in dict.fromkeys(called) if not _is_for_other_sizes(target, name)):
        yield from _executed(target, name, times * called.count(name))


def _is_for_other_sizes(target: TargetRecord, function: str) -> bool:
    """Whether a function has other sizes' versions of functions, and none of these for the example's sizes."""
    found = {s for launch in target.launches if launch.function == function and (s := source_of_launch(target, launch))}
    others = {source.base for source in found if source.function in target.other_sizes}
    return bool(others) and not any(s.base in others and s.function not in target.other_sizes for s in found)


def _is_of_other_sizes(target: TargetRecord, launch: Launch) -> bool:
    """Whether a launch runs for other sizes than the example's."""
    source = source_of_launch(target, launch)
    return source is not None and source.function in target.other_sizes


def work_of(operator: Operator, times: int, name: str) -> Work:
    """The work of an operator that executes so often, under `name`."""
    flops = None if operator.flops is None else times * operator.flops
    return Work(name, times, flops, times * operator.read, times * operator.written)


def operator_work(analysis: Analysis, entry: str, key: Callable[[Source], str]) -> list[Work]:
    """The work of the captured operators of an entry point, by `key` of their sources; the most first."""
    return _grouped(work_of(o, times, key(source)) for o, source, times in operators_of(analysis, entry))


def launch_work(target: TargetRecord, entry: str, key: Callable[[Launch], str]) -> list[Work]:
    """The work of the launches of an entry point, by `key`; the most first."""
    return _grouped(e.work(target, key(e.launch)) for e in executed(target, entry))


def kernel_name(target: TargetRecord, launch: Launch) -> str:
    """The name of the kernel of a launch; `copy` for a copy."""
    return COPY if launch.kernel is None else target.kernels[launch.kernel].name


def source_of_launch(target: TargetRecord, launch: Launch) -> Source | None:
    """The source of a launch, as in `Launch.source`; None if unknown."""
    return None if launch.source is None else target.sources[launch.source]


def total(works: list[Work], name: str) -> Work:
    """The sum of `works`, under `name`."""
    return sum(works, Work(name, 0, 0, 0, 0))


def with_parents(works: list[Work]) -> list[Work]:
    """Works by module path, with the sum of every module over those inside it, by path."""
    found: dict[str, Work] = {}
    for work in works:
        parts = work.name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            part = Work(path, work.count, work.flops, work.read, work.written)
            found[path] = found[path] + part if path in found else part
    return [found[path] for path in sorted(found)]


def _grouped(works: Iterable[Work]) -> list[Work]:
    groups: dict[str, Work] = {}
    for work in works:
        groups[work.name] = groups[work.name] + work if work.name in groups else work
    return sorted(groups.values(), key=lambda w: (w.flops or 0, w.nbytes), reverse=True)
