"""Passes over the step graph, one file each: docs/dev/adding.md has their invariants, `registry.MODULES` the list."""

from irongrad.passes.base import Context, Pass, PassResult
from irongrad.passes.manager import PassRecord, run_passes
from irongrad.passes.pipelines import DEFAULT_LEVEL, chosen_passes, passes_at
from irongrad.passes.registry import is_known_pass, parse_passes, registered, spelled, without

__all__ = [
    "DEFAULT_LEVEL",
    "Context",
    "Pass",
    "PassRecord",
    "PassResult",
    "chosen_passes",
    "is_known_pass",
    "parse_passes",
    "passes_at",
    "registered",
    "run_passes",
    "spelled",
    "without",
]
