"""Write and read the record of a compilation, `analysis.json.gz`."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msgspec

from irongrad.analysis.records import FORMAT_VERSION, Analysis
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.integrity import checked_bytes
from irongrad.runtime.manifest import ANALYSIS, Manifest

_DEEPEST = 200  # levels of modules, and of functions that call each other
_LARGEST = 1 << 62  # of any count


def checked(analysis: Analysis) -> Analysis:
    """The record, if every index in it points to something and every number is one that a compiler could have counted.

    Raises:
        ValueError: says what is wrong.
    """
    if not analysis.targets:
        raise ValueError("it has no target")
    sources = len(analysis.sources)
    for operator in analysis.operators:
        _check_index(operator.source, sources)
        _check_counts(operator.flops or 0, operator.elements, operator.read, operator.written, operator.times)
    for record in analysis.targets.values():
        for launch in record.launches:
            _check_index(launch.kernel or 0, len(record.kernels) or 1)
            _check_index(launch.source or 0, len(record.sources) or 1)
            _check_counts(launch.read, launch.written, launch.times, launch.intermediates, launch.intermediate_bytes)
        _check_counts(*(kernel.operations or 0 for kernel in record.kernels))
        _check_calls(record.calls)
    named = itertools.chain(analysis.sources, *(record.sources for record in analysis.targets.values()))
    if any(source.module.count(".") > _DEEPEST for source in named):
        raise ValueError("its modules are nested too deeply")
    return analysis


def _check_index(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"the index {index} points to nothing")


def _check_counts(*counts: int) -> None:
    if any(not 0 <= count < _LARGEST for count in counts):
        raise ValueError("a count is negative, or larger than any program's")


def _check_calls(calls: Mapping[str, tuple[str, ...]]) -> None:
    depth: dict[str, int] = {}
    try:
        for function in TopologicalSorter(calls).static_order():
            depth[function] = 1 + max((depth[called] for called in calls.get(function, ())), default=0)
    except CycleError as error:
        raise ValueError(f"{error.args[1][0]} calls itself") from None
    if max(depth.values(), default=0) > _DEEPEST:
        raise ValueError("its functions call each other too deeply")


def encoded(analysis: Analysis) -> bytes:
    """The bytes of the file, which are equal for equal records."""
    return gzip.compress(msgspec.json.encode(analysis), mtime=0)


def read_analysis(directory: Path, manifest: Manifest) -> Analysis:
    """Read the record of the artifact in `directory`.

    Raises:
        ArtifactError: the record is missing, damaged, or of another version.
    """
    if ANALYSIS not in manifest.files or not (directory / ANALYSIS).exists():
        raise ArtifactError(
            f"{directory} has no {ANALYSIS}, in which the compiler records what a step does. Compile the step again"
        )
    data = checked_bytes(manifest, directory, ANALYSIS)
    try:
        plain = gzip.decompress(data)
        version = int(msgspec.json.decode(plain)["format_version"])
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"{directory / ANALYSIS} has version {version}; this IronGrad reads version {FORMAT_VERSION}. Compile "
                "the step again, or install the IronGrad that made it"
            )
        return checked(msgspec.json.decode(plain, type=Analysis))
    except (OSError, EOFError, zlib.error, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{directory / ANALYSIS} is damaged: {error}. Compile the step again") from None
