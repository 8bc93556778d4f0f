"""The portable modules of the parts of a placed step, as one program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.assemble.assemble import AssembledModule
from irongrad.pipeline.assemble.interface import Interface
from irongrad.runtime.manifest import STACKED, PlacementSpec


@dataclass(frozen=True)
class PlacedModules:
    """The program of a placed step: a portable module for each part.

    Attributes:
        graph: the step graph before it was cut.
        interface: its entry points.
        placement: the parts, and the calls of each entry point.
        modules: the portable module of each part, by the name of its target.
    """

    graph: StepGraph
    interface: Interface
    placement: PlacementSpec
    modules: Mapping[str, AssembledModule]

    @property
    def graphs(self) -> tuple[StepGraph, ...]:
        """The step graph before it was cut."""
        return (self.graph,)

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The entry points."""
        return (self.interface,)

    @property
    def portable(self) -> dict[str, bytes]:
        """The files of the portable modules."""
        return {f"step.{name}.mlirbc": module.bytecode for name, module in self.modules.items()}


def without_loops(interface: Interface) -> Interface:
    """`interface` without the entry points that loop inside a module, which no single module of a placed step can."""
    return replace(interface, entry_points=tuple(e for e in interface.entry_points if e.name not in STACKED))
