"""The captured step as a graph for Model Explorer (github.com/google-ai-edge/model-explorer), as its own JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from irongrad.analysis.records import Analysis, Operator, Source
from irongrad.runtime.atomic_files import atomic_write


def write_graph(analysis: Analysis, label: str, path: Path) -> None:
    """Write the functions of a step as a graph collection, whole or not at all; `label` names the collection.

    Each function is a graph, each operator a node, and modules are the layers that unfold.
    """
    functions = dict.fromkeys(analysis.sources[o.source].function for o in analysis.operators)
    graphs = [{"id": name, "nodes": list(_nodes(analysis, name))} for name in functions]
    atomic_write(path, json.dumps({"label": label, "graphs": graphs}).encode())


def _nodes(analysis: Analysis, function: str) -> Iterator[dict[str, Any]]:
    rows = [(o, analysis.sources[o.source]) for o in analysis.operators]
    own = [(o, source) for o, source in rows if source.function == function]
    known = {o.name for o, _ in own}
    for operator, source in own:
        inputs = [name for name in operator.inputs if name in known]
        yield {
            "id": operator.name,
            "label": source.operator.removeprefix("aten.").removesuffix(".default"),
            "namespace": "/".join((source.phase, *_layers(source.module))),
            "incomingEdges": [_edge(name, place) for place, name in enumerate(inputs)],
            "attrs": [{"key": key, "value": value} for key, value in _attributes(operator, source, analysis)],
        }


def _layers(module: str) -> Sequence[str]:
    """The modules around an operator, the outermost first; a slash in a name would be one layer more."""
    return [part.replace("/", "|") for part in module.split(".")] if module else []


def _edge(name: str, place: int) -> dict[str, str]:
    return {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}


def _attributes(operator: Operator, source: Source, analysis: Analysis) -> Iterator[tuple[str, str]]:
    yield "result", f"{operator.dtype}{list(operator.shape)}"
    if source.line:
        yield "line", f"{source.line}: {analysis.lines.get(source.line, '')}"
    yield "FLOP", "unknown" if operator.flops is None else f"{operator.flops:,}"
    yield "bytes read", f"{operator.read:,}"
    yield "bytes written", f"{operator.written:,}"
    if operator.times > 1:
        yield "times", f"{operator.times:,}"
