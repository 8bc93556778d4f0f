"""From a step graph to the portable module: the part of the compiler that all frontends share.

`driver.py` runs it for a training step, and `frontends/` for functions, torch.compile and JAX bundles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from irongrad.graph.step_graph import StepGraph
from irongrad.mlir.walk import bytecode_of, parsed
from irongrad.operators.legalize.legality import check_float64
from irongrad.passes import DEFAULT_LEVEL, Pass, passes_at, run_passes
from irongrad.pipeline.assemble.assemble import AssembledModule, Part, assemble
from irongrad.pipeline.assemble.interface import Interface
from irongrad.pipeline.iree.phases import ASSEMBLED, ModuleObserver, run_phase, unobserved
from irongrad.pipeline.lower.importer import import_functions
from irongrad.targets import Target


def optimised_function(graph: StepGraph, target: Target) -> tuple[StepGraph, tuple[Pass, ...]]:
    """Run the passes of the default level on a graph for one target; return the graph and the passes.

    Raises:
        UnsupportedOpError: the graph computes in float64, and the target's devices cannot.
    """
    passes = passes_at(DEFAULT_LEVEL)
    graph = run_passes(graph, passes, [target.backend], abilities=target.abilities)
    check_float64(graph, [target])
    return graph, passes


def portable_module(
    parts: Sequence[Part],
    disabled: Sequence[str] = (),
    observer: ModuleObserver = unobserved,
) -> AssembledModule:
    """Assemble a module, and run the passes that do not depend on a target.

    Args:
        parts: the functions in linalg and the entry points of each step.
        disabled: names of passes over IREE's module to leave out.
        observer: called after each pass.

    Raises:
        InternalError: the result is invalid MLIR.
    """
    module = assemble(parts)
    with parsed(module.bytecode) as whole:
        run_phase(ASSEMBLED, whole, None, disabled, observer)
        return replace(module, bytecode=bytecode_of(whole))


def portable_function(graph: StepGraph, interface: Interface, scratch: Path) -> AssembledModule:
    """Import the functions of `graph` and assemble them into a portable module."""
    return portable_module([Part(import_functions(graph, scratch), interface)])
