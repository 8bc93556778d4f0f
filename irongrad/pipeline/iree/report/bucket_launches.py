"""Which bucket a launch belongs to that names no operator, such as a copy.

All buckets are branches of one entry point. A branch that runs functions of the step graph for one bucket alone is that
bucket's, with all that runs in it. What IREE has moved out of these branches runs for all buckets, though it names an
operator of one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from irongrad.analysis.records import Source
from irongrad.pipeline.iree.report.branches import Branches


@dataclass(frozen=True, eq=False)
class FoundLaunch:
    """A launch in a function of the module.

    Attributes:
        kernel: the index of its kernel; None for a copy.
        source: where it comes from; None if unknown.
        branches: the branches that it is in.
        counts: the counts of `irongrad.analysis.records.Launch`, in its order.
    """

    kernel: int | None
    source: Source | None
    branches: Branches
    counts: tuple[int, int, int, int, int]


def with_buckets(
    launches: Mapping[str, Sequence[FoundLaunch]], calls: Mapping[str, Sequence[tuple[str, Branches]]]
) -> dict[str, list[FoundLaunch]]:
    """The launches of each function of the module; those without a source have a function of their bucket, if any.

    A launch that runs for several buckets has a source without a function.

    Args:
        launches: the launches of each function.
        calls: the functions that each function calls, with the branches that the calls are in.
    """
    running = {name: {_function(one.source) for one in own if one.source} for name, own in launches.items()}
    versions = _versions(running.values())
    found = {}
    for name, own in launches.items():
        known = [(_function(one.source), one.branches) for one in own if one.source]
        known += [(source, branches) for callee, branches in calls[name] for source in running.get(callee, ())]
        found[name] = list(_of_buckets(own, known, versions))
    return found


def _function(source: Source) -> Source:
    """A source that has only the function of `source`."""
    return Source(source.function, "", "", "", "")


def _versions(running: Iterable[Collection[Source]]) -> set[str]:
    """The names, without the bucket, of functions that have a version for each of several buckets."""
    found: dict[str, set[str]] = defaultdict(set)
    for source in {source for sources in running for source in sources}:
        found[source.base].add(source.bucket)
    return {base for base, buckets in found.items() if len(buckets) > 1}


def _of_buckets(
    launches: Sequence[FoundLaunch], known: Sequence[tuple[Source, Branches]], versions: Collection[str]
) -> Iterator[FoundLaunch]:
    inside: dict[Branches, set[Source]] = defaultdict(set)
    for source, branches in known:
        if source.base in versions:
            for depth in range(len(branches) + 1):
                inside[branches[:depth]].add(source)
    for launch in launches:
        bucket = _of_one_bucket(launch.branches, inside)
        if launch.source is None:
            yield replace(launch, source=bucket)
        elif launch.source.base in versions and bucket is None:
            yield replace(launch, source=replace(launch.source, function=""))
        else:
            yield launch


def _of_one_bucket(branches: Branches, inside: Mapping[Branches, Collection[Source]]) -> Source | None:
    """A function of the innermost of `branches` with versions of functions; None if they are of several buckets."""
    for depth in range(len(branches), -1, -1):
        if found := inside.get(branches[:depth]):
            return min(found, key=str) if len({source.bucket for source in found}) == 1 else None
    return None
