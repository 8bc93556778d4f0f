"""The record of a step whose parts run on devices of their own, as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from irongrad.analysis.file import read_analysis
from irongrad.analysis.records import Analysis, Kernel, Launch, TargetRecord
from irongrad.runtime.manifest import Manifest, PlacementSpec, TargetSpec

# The name of what all targets of a placed step execute together.
ALL_PARTS = "all parts"


def read_record(directory: Path, manifest: Manifest) -> Analysis:
    """Read the record of an artifact; that of a placed step begins with a target for all of its parts together.

    Raises:
        ArtifactError: as `irongrad.analysis.file.read_analysis`.
    """
    analysis = read_analysis(directory, manifest)
    if manifest.placement is None:
        return analysis
    chains = {
        entry: tuple(name for call in program for name in analysis.chains.get(call.entry.symbol, ()))
        for entry, program in manifest.placement.programs.items()
    }
    together = _together(analysis, manifest.placement)
    return replace(analysis, chains={**chains, **analysis.chains}, targets={ALL_PARTS: together, **analysis.targets})


def targets_of(manifest: Manifest, target: str) -> list[TargetSpec]:
    """The targets that `target` stands for; none if there is no such target."""
    together = target == ALL_PARTS and manifest.placement is not None
    return [spec for spec in manifest.targets if together or spec.name == target]


def _together(analysis: Analysis, placement: PlacementSpec) -> TargetRecord:
    records = {part.target: analysis.targets[part.target] for part in placement.parts}
    targets = {part.name: part.target for part in placement.parts}
    calls = {
        entry: tuple(_named(targets[call.part], call.entry.symbol) for call in program)
        for entry, program in placement.programs.items()
    }
    for target, record in records.items():
        for function, called in record.calls.items():
            calls[_named(target, function)] = tuple(_named(target, name) for name in called)
    return TargetRecord(
        tuple(itertools.chain.from_iterable(record.sources for record in records.values())),
        tuple(_kernels(records)),
        tuple(_launches(records)),
        calls,
        judged=tuple(itertools.chain.from_iterable(record.judged for record in records.values())),
    )


def _kernels(records: dict[str, TargetRecord]) -> Iterator[Kernel]:
    sources = 0
    for target, record in records.items():
        for kernel in record.kernels:
            own = tuple(sources + n for n in kernel.sources)
            yield Kernel(_named(target, kernel.name), kernel.operations, own)
        sources += len(record.sources)


def _launches(records: dict[str, TargetRecord]) -> Iterator[Launch]:
    sources = kernels = 0
    for target, record in records.items():
        for launch in record.launches:
            yield replace(
                launch,
                function=_named(target, launch.function),
                kernel=None if launch.kernel is None else kernels + launch.kernel,
                source=None if launch.source is None else sources + launch.source,
            )
        sources, kernels = sources + len(record.sources), kernels + len(record.kernels)


def _named(target: str, name: str) -> str:
    return f"{target}/{name}"
