"""Limits on dimensions from lookups by position: a table of positions has a fixed number of rows.

Eager checks an index where it is used; compiled code does not (`irongrad.pipeline.guards.index_ranges`). Indices may
be an arange up to a size, as in `positions(torch.arange(x.shape[1]))`. These are in range for sizes up to the number
of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from irongrad.pipeline.guards.index_ranges import keeps_values
from irongrad.sizes.dimensions import Names

aten = torch.ops.aten

_LOOKUPS = {aten.embedding.default: (0, 1), aten.index_select.default: (0, 2), aten.index.Tensor: (0, 1)}
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def table_conditions(program: ExportedProgram, names: Names) -> Iterator[Any]:
    """Yield the conditions on named dimensions under which all lookups by position stay within their tables."""
    for node in program.graph.nodes:
        if node.target not in _LOOKUPS:
            continue
        table, indices = (node.args[i] for i in _LOOKUPS[node.target])
        chosen = indices if isinstance(indices, list | tuple) else [indices]
        first = node.args[1] if node.target is aten.index_select.default else 0
        for dim, index in enumerate(chosen, first):
            source = _source(index)
            if source is None:
                continue
            size, rows = source.meta["val"].shape[0], table.meta["val"].shape[dim]
            if isinstance(size, torch.SymInt):
                start = 0 if source.target is aten.arange.default else source.args[0]
                limit = rows.node.expr if isinstance(rows, torch.SymInt) else rows
                yield sympy.Le(size.node.expr + start, limit).xreplace(dict(names))


def _source(index: Any) -> Node | None:
    """The arange from which `index` takes its elements, if there is one and its step is one."""
    while isinstance(index, Node) and keeps_values(index):
        index = index.args[0]
    if not isinstance(index, Node) or index.target not in _ARANGES:
        return None
    step = index.args[2] if index.target is aten.arange.start_step and len(index.args) > 2 else 1
    return index if step == 1 else None
