"""Source locations of a module, without the folders that only this machine has.

A compiled file keeps the locations of what it was made of. With absolute paths the same step would compile to other
bytes in another directory, and tell where its author works. So a location names a file as Python imports it:
`torch/nn/modules/linear.py`, `net.py`.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import PurePath

from torch.fx import Node
from torch_mlir.extras.fx_importer import ContextCache, FxImporter
from torch_mlir.ir import Context, Location

_FRAME = re.compile(r'File "([^"]+)", line (\d+),')
_paths: dict[str, str] = {}


@functools.cache
def portable(path: str) -> str:
    """The file at `path` as it is imported; its name alone where no module is made of it.

    torch.fx numbers the code it makes (`<eval_with_key>.12`), which says how much was traced before.
    """
    if path.startswith("<"):
        return path.partition(">")[0] + ">"
    module = next((n for n, m in list(sys.modules.items()) if getattr(m, "__file__", None) == path), "__main__")
    pure = PurePath(path)
    depth = module.count(".") + (2 if pure.stem == "__init__" else 1)
    name = "/".join(pure.parts[-depth:])
    _paths[name] = path
    return name


def absolute(name: str) -> str:
    """The file that `portable` made `name` of in this process; `name` itself where it made none."""
    return _paths.get(name, name)


class PortableImporter(FxImporter):
    """torch-mlir's importer of FX graphs, with portable locations."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._cc = _Cache(self._c, py_attr_tracker=self._py_attr_tracker)


class _Cache(ContextCache):
    def __init__(self, context: Context, **options: object) -> None:
        super().__init__(context, **options)
        self._locations: dict[str, Location | None] = {}  # by stack trace, which all nodes of a line have in common

    def get_node_location(self, node: Node) -> Location | None:
        """The user's line, called from the lines around it."""
        trace = node.stack_trace or ""
        if trace not in self._locations:
            self._locations[trace] = self._location_of(trace)
        return self._locations[trace]

    def _location_of(self, trace: str) -> Location | None:
        frames = _FRAME.findall(trace)
        if not frames:
            return None
        inner, *around = (Location.file(portable(p), int(line), 0, context=self._c) for p, line in reversed(frames))
        return Location.callsite(inner, around, context=self._c) if around else inner
