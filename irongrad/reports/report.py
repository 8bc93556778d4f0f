"""The whole report on an artifact, which `irongrad report` writes as a page and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from irongrad.analysis.machine import Machine
from irongrad.analysis.records import Judged, PassChange
from irongrad.analysis.totals import Work
from irongrad.reports.fusion_groups import FusionGroup, fusion_groups
from irongrad.reports.memory_over_time import MemoryOverTime, memory_over_time
from irongrad.reports.model_tree import Module, model_tree
from irongrad.reports.peaks import is_of_cpu, machine
from irongrad.reports.placed import read_record
from irongrad.reports.profile import Profile, read_profile
from irongrad.reports.summary import entries_of, summary_of
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import Manifest
from irongrad.runtime.manifest_file import read_manifest


@dataclass(frozen=True)
class Report:
    """What an artifact is, and what one call of an entry point does.

    Attributes:
        name: the name of the artifact's directory.
        manifest: the artifact's manifest.
        entry: the entry point, by its symbol.
        entries: the entry points that a report can be about.
        target: the target.
        captured: all operators as captured. Each reads its operands from memory and writes its results, as in eager.
        compiled: all launches of kernels, and copies.
        phases: the captured operators by phase.
        model: the step as a tree, down to the operators and kernels of each line.
        passes: what each pass over the step graph changed, in order.
        groups: the kernels with the operators that they compute, the one with the most bytes first.
        memory: the memory of each function over its schedule.
        judged: the verified values, the one nearest to its bound first. A value that several entry points compute
            stands once, with the largest error.
        machine: the peaks of this machine; None if the target is not for a CPU.
        profile: the profile of the entry point; None if none was given.
    """

    name: str
    manifest: Manifest
    entry: str
    entries: tuple[str, ...]
    target: str
    captured: Work
    compiled: Work
    phases: tuple[Work, ...]
    model: Module
    passes: tuple[PassChange, ...]
    groups: tuple[FusionGroup, ...]
    memory: tuple[MemoryOverTime, ...]
    judged: tuple[Judged, ...]
    machine: Machine | None
    profile: Profile | None


def report_on(
    directory: Path, entry: str | None = None, target: str | None = None, profile: Path | None = None
) -> Report:
    """Read the artifact in `directory`, and sum up one call of an entry point.

    Args:
        directory: the artifact.
        entry: the symbol of an entry point. By default that of the profile, or else the training step.
        target: which of the artifact's targets. By default that of the profile, or else the first.
        profile: a profile that `irongrad profile` wrote.

    Raises:
        ArtifactError: the artifact or its record is missing, damaged, or of another version.
        UserError: there is no such entry point or target, or nothing that computes; or the profile is missing, damaged,
            or of another artifact, entry point or target.
    """
    manifest = read_manifest(directory)
    analysis = read_record(directory, manifest)
    times = None if profile is None else read_profile(profile, manifest, analysis)
    chosen = target or (times.target if times else next(iter(analysis.targets)))
    entries = entries_of(analysis, chosen)
    if not entries:
        raise UserError(f"{directory} has no entry point that computes something")
    called = entry or (times.entry if times else entries[0])
    if times is not None and (times.entry, times.target) != (called, chosen):
        raise UserError(f"{profile} is the profile of {times.entry} on {times.target}, not of {called} on {chosen}")
    summary, record = summary_of(analysis, chosen, called), analysis.targets[chosen]
    peaks = machine() if is_of_cpu(manifest, chosen) else None
    return Report(
        directory.resolve().name,
        manifest,
        called,
        tuple(entries),
        chosen,
        summary.captured,
        summary.compiled,
        summary.phases,
        model_tree(analysis, record, called, times),
        analysis.passes,
        fusion_groups(record, called, peaks, times),
        tuple(memory_over_time(analysis, timeline) for timeline in analysis.timelines),
        _nearest_first(record.judged),
        peaks,
        times,
    )


def _nearest_first(judged: tuple[Judged, ...]) -> tuple[Judged, ...]:
    found: dict[str, Judged] = {}
    for value in sorted(judged, key=lambda value: value.error / value.allowed, reverse=True):
        found.setdefault(value.key, value)
    return tuple(found.values())
