"""Source locations of a module, without folders that exist only on this machine.

A compiled file keeps the locations of its sources. With absolute paths, the same step would compile to different bytes
in another directory, and reveal where its author works. So a location names a file as Python imports it:
`torch/nn/modules/linear.py`, `net.py`.

Around it lies the name of the operator's `Source`, so that reports find what a kernel computes.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch_mlir.extras.fx_importer import ContextCache, FxImporter
from torch_mlir.ir import Context, Location

from irongrad.diagnostics.portable_paths import FRAME, portable
from irongrad.graph.sources import source_of


class PortableImporter(FxImporter):
    """torch-mlir's importer of FX graphs, with portable locations."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._cc = self._locating = _Cache(self._c, py_attr_tracker=self._py_attr_tracker)

    def import_function(self, graph: Graph, function: str, prefix: str) -> Any:
        """Import `graph`, the function `function` of a step graph whose functions have the prefix `prefix`."""
        self._locating.function, self._locating.prefix = function, prefix
        return self.import_stateless_graph(graph, func_name=f"graph.{prefix}{function}")


class _Cache(ContextCache):
    def __init__(self, context: Context, **options: object) -> None:
        super().__init__(context, **options)
        self.function = self.prefix = ""
        self._locations: dict[str, Location | None] = {}  # by stack trace, which all nodes of one source line share

    def get_node_location(self, node: Node) -> Location:
        """The location of the user's line, as a call site in the lines of its callers, under the node's source."""
        name = source_of(self.function, node, self.prefix).spelled()
        return Location.name(name, childLoc=self._line_of(node), context=self._c)

    def _line_of(self, node: Node) -> Location | None:
        trace = node.stack_trace or ""
        if trace not in self._locations:
            self._locations[trace] = self._location_of(trace)
        return self._locations[trace]

    def _location_of(self, trace: str) -> Location | None:
        frames = FRAME.findall(trace)
        if not frames:
            return None
        inner, *around = (Location.file(portable(p), int(line), 0, context=self._c) for p, line in reversed(frames))
        return Location.callsite(inner, around, context=self._c) if around else inner
