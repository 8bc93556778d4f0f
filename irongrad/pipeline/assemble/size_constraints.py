"""The constraints on sizes that entry points check, as listed in the manifest, each with sizes that violate it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.assemble.size_guards import accepted_sizes, needed
from irongrad.runtime.manifest import ConstraintSpec
from irongrad.sizes.buckets import smallest
from irongrad.sizes.dimensions import holds
from irongrad.sizes.limits import Limits, spelled

_STEPS = (1, -1, 2, -2, 3, 4, 8, 16)


def constraints_of(graph: StepGraph) -> tuple[ConstraintSpec, ...]:
    """The constraints on a call's sizes, other than the interval of each dimension."""
    always = graph.bucket_limits.conditions
    found = dict.fromkeys((*always, *(graph.limits or Limits()).conditions))
    return tuple(ConstraintSpec(spelled(c), needed(c), _violating_sizes(c, graph, found)) for c in found)


def _violating_sizes(condition: Any, graph: StepGraph, conditions: Mapping[Any, None]) -> dict[str, int]:
    """Sizes near the example's that violate `condition` and no other condition; empty if none are found."""
    for sizes in _sizes_near_example(graph, {s.name for s in condition.free_symbols}):
        fits = smallest(graph.buckets, sizes) is not None
        checked = fits if graph.limits is None else not fits or condition in graph.bucket_limits.conditions
        if checked and [c for c in conditions if not holds(c, sizes)] == [condition]:
            return sizes
    return {}


def _sizes_near_example(graph: StepGraph, varied: set[str]) -> Iterator[dict[str, int]]:
    accepted = accepted_sizes(graph)
    example = {name: graph.inputs[n].shape[d] for n, dims in _dimensions_of_step(graph) for d, name in dims.items()}
    tried: list[list[int]] = []
    for name, (least, most) in accepted.items():
        sizes = [example[name], *(example[name] + n for n in _STEPS if name in varied)]
        tried.append([s for s in sizes if s >= least and (most is None or s <= most)])
    return (dict(zip(accepted, chosen, strict=True)) for chosen in itertools.product(*tried))


def _dimensions_of_step(graph: StepGraph) -> Iterator[tuple[str, Mapping[int, str]]]:
    """The named dimensions of the step's own inputs; the example of an entry may have other sizes."""
    of_entries = {name for names in graph.entries.values() for name in names}
    return ((name, dims) for name, dims in graph.dynamic.items() if name not in of_entries)
