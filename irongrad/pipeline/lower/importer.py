"""StepGraph -> linalg: torch-mlir imports each function, and a route lowers it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.lower.control_flow import ControlFlowImporter
from irongrad.pipeline.lower.literals import InlineLiterals
from irongrad.pipeline.lower.reshapes import joined_and_split
from irongrad.pipeline.lower.routes import Lowered, lower
from irongrad.pipeline.lower.scatters import written_to_copies
from irongrad.pipeline.lower.source_locations import PortableImporter
from irongrad.pipeline.lower.stablehlo import for_stablehlo
from irongrad.runtime.errors import ToolchainError, UserError

_STRICT = "torch.assume_strict_symbolic_shapes"


@dataclass(frozen=True)
class ImportedStep:
    """The functions of a step graph as linalg on tensors.

    Attributes:
        graph: the step graph.
        modules: the functions at each level of their lowering; the function `f` of the step graph is `@graph.f`, with
            the name of a named step before `f`.
    """

    graph: StepGraph
    modules: Lowered


def import_functions(graph: StepGraph, scratch: Path, route: str = "linalg") -> ImportedStep:
    """Import every function of `graph` and lower it by `route`.

    Intermediate files stay in `scratch` if something fails.

    Raises:
        UnsupportedOpError: torch-mlir cannot lower an operator with these arguments; with the user's line.
        ToolchainError: torch-mlir fails otherwise; with its diagnostic and the user's line.
    """
    if route == "stablehlo":
        graph = for_stablehlo(graph)
    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = PortableImporter(context=context, hooks=InlineLiterals(), graph_node_importer_cls=ControlFlowImporter)
    for name, function in graph.functions.items():
        try:
            whole = joined_and_split(function.graph) if function.of_any_size else function.graph
            whole = written_to_copies(whole)
            imported = importer.import_function(whole.graph, name, graph.prefix)
            # Equal symbols mean equal sizes, and no symbolic size broadcasts, so the compiled code need not check that.
            imported.attributes[_STRICT] = ir.UnitAttr.get(context=context)
        except UserError:
            raise
        except Exception as error:
            raise ToolchainError(f"torch-mlir cannot import the function {name!r}: {error}") from error
    return ImportedStep(graph, lower(importer.module, route, scratch))
