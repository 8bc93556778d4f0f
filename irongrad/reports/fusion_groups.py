"""The kernels that an entry point launches, each with the operators that it computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from irongrad.analysis.machine import Machine
from irongrad.analysis.records import Source, TargetRecord
from irongrad.analysis.totals import COPY, Work, executed, kernel_name, launch_work, source_of_launch
from irongrad.reports.profile import Profile


@dataclass(frozen=True)
class FusionGroup:
    """A kernel, or all copies.

    Attributes:
        work: its work in one call of the entry point, under its name; `copy` for copies.
        operators: what one launch computes, in program order. If several launches share the kernel, the operators of
            one of them.
        modules: the modules that launch it, each with how often; an empty name is code outside of modules.
        least_seconds: the least time that its work takes on the machine; None if the machine is not measured.
        bound: what gives that least time, `arithmetic` or `memory`; empty if the machine is not measured.
        seconds: its time, the median over the profiled steps; None without a profile, and for copies.
    """

    work: Work
    operators: tuple[Source, ...]
    modules: dict[str, int]
    least_seconds: float | None
    bound: str
    seconds: float | None


def fusion_groups(
    record: TargetRecord, entry: str, machine: Machine | None, profile: Profile | None
) -> tuple[FusionGroup, ...]:
    """The kernels that one call of `entry` launches, the one with the most bytes first.

    Args:
        record: what the target executes.
        entry: the symbol of an entry point.
        machine: the machine that runs it; None if it is not measured.
        profile: the profile of the entry point, if there is one.
    """
    seconds = {k.name: k.seconds for k in profile.kernels} if profile else {}
    launched: dict[str, dict[Source, int]] = defaultdict(lambda: defaultdict(int))
    for one in executed(record, entry):
        source = source_of_launch(record, one.launch)
        if source is not None and source.operator:
            launched[kernel_name(record, one.launch)][source] += one.times
    own = {k.name: tuple(record.sources[n] for n in k.sources) for k in record.kernels}
    works = launch_work(record, entry, lambda launch: kernel_name(record, launch))
    return tuple(
        _group(work, own.get(work.name, ()), launched[work.name], machine, seconds.get(work.name))
        for work in sorted(works, key=lambda work: work.nbytes, reverse=True)
    )


def _group(
    work: Work,
    own: tuple[Source, ...],
    launched: Mapping[Source, int],
    machine: Machine | None,
    seconds: float | None,
) -> FusionGroup:
    modules: dict[str, int] = defaultdict(int)
    for source, times in launched.items():
        modules[source.module] += times
    computed = own or (() if work.name == COPY else tuple(launched)[:1])
    return FusionGroup(
        work,
        computed,
        dict(modules),
        machine.seconds(work.flops or 0, work.nbytes) if machine else None,
        machine.bound(work.flops or 0, work.nbytes) if machine else "",
        seconds,
    )
