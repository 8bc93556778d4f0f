"""StepGraph -> linalg: torch-mlir imports each function, and lowers them in a process of its own.

torch-mlir 20261001 ends the whole process on some inputs (an assertion in its scatter lowering, a division by
zero for an empty matmul), which must not take the user's Python with it.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch_mlir
from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect

from irongrad.pipeline.control_flow import ControlFlowImporter
from irongrad.pipeline.diagnostics import lowering_error
from irongrad.pipeline.graphs import StepGraph
from irongrad.pipeline.literals import InlineLiterals
from irongrad.pipeline.locations import PortableImporter
from irongrad.runtime.errors import ToolchainError, UserError

_LOWERING = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline,torch-backend-to-linalg-on-tensors-backend-pipeline)"
)


@dataclass(frozen=True)
class ImportedStep:
    """The functions of a step graph as linalg on tensors.

    Attributes:
        graph: the step graph.
        torch: the module in the torch dialect, as text.
        linalg: the lowered module, as text; the function `f` of the step graph is `@graph.f`.
    """

    graph: StepGraph
    torch: str
    linalg: str


def import_functions(graph: StepGraph, scratch: Path) -> ImportedStep:
    """Import every function of `graph`; intermediate files are left in `scratch` when something fails.

    Raises:
        UnsupportedOpError: torch-mlir cannot lower an operator with these arguments; with the user's line.
        ToolchainError: torch-mlir fails otherwise; with its diagnostic and the user's line.
    """
    context = ir.Context()
    torch_dialect.register_dialect(context)
    importer = PortableImporter(context=context, hooks=InlineLiterals(), graph_node_importer_cls=ControlFlowImporter)
    for name, function in graph.functions.items():
        try:
            importer.import_stateless_graph(function.graph.graph, func_name=f"graph.{name}")
        except UserError:
            raise
        except Exception as error:
            raise ToolchainError(f"torch-mlir cannot import the function {name!r}: {error}") from error
    source, target = scratch / "torch.mlir", scratch / "linalg.mlir"
    text = importer.module.operation.get_asm(enable_debug_info=True)
    source.write_text(text)
    tool = Path(torch_mlir.__path__[0]) / "_mlir_libs" / "torch-mlir-opt"
    command = [str(tool), f"--pass-pipeline={_LOWERING}", "--mlir-print-debuginfo", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise lowering_error(result, source)
    return ImportedStep(graph, text, target.read_text())
