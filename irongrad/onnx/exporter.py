"""What PyTorch's exporters say about the tensors of a file: which are parameters, and which they merged or computed.

The exporter writes the kinds into the file's metadata (torch 2.13, torch/onnx/_internal/exporter/_core.py), and its
optimizer adds what it folded (onnxscript 0.7, optimizer/_constant_folding.py). The older exporter, `dynamo=False`,
writes names alone.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping

import onnx

from irongrad.runtime.errors import UserError

PARAMETER = "PARAMETER"
# An initialiser that the exporter computed from others.
FOLDED = "pkg.onnxscript.optimizer.folded_from"
# `PARAMETER`, `BUFFER` or `CONSTANT_TENSOR`.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
# The name of an initialiser as an input of the exported program.
_ORIGINAL = "pkg.torch.onnx.original_node_name"
# The line of the exported program that became a node, such as
# `%linear : … = call_function[target=…](args = (%x, %p_fc_weight, %p_fc_bias), kwargs = {})`.
_LINE = "pkg.torch.onnx.fx_node"


def is_older(model: onnx.ModelProto) -> bool:
    """Return whether PyTorch's older exporter wrote the file: it names the module's tensors, but not their kinds."""
    return bool(model.producer_name == "pytorch") and not said_of(model.graph)


def is_of_module(name: str) -> bool:
    """Return whether a name of the older exporter is that of a tensor of the module: not `onnx::Mul_3` or `/l/Add`."""
    return bool(re.fullmatch(r"[\w.]+", name)) and not name.isdigit()


def separate_equal(graph: onnx.GraphProto) -> None:
    """Make each initialiser that the older exporter merged an initialiser of its own again.

    In evaluation mode it keeps one of several that have equal values, and writes the others as `Identity` of it (torch
    2.13, torch/csrc/jit/passes/onnx/deduplicate_initializers.cpp). Tied weights have no such node.
    """
    arrays = {t.name: t for t in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "Identity" and n.input[0] in arrays]:
        if is_of_module(node.output[0]):
            graph.initializer.add().CopyFrom(arrays[node.input[0]])
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)


def said_of(graph: onnx.GraphProto) -> dict[str, str]:
    """Return what the exporter says about initialisers, by name: their kind, or `FOLDED`."""
    found = {}
    for name, about in _metadata(graph).items():
        if _KIND in about:
            found[name] = about[_KIND]
        elif FOLDED in about:
            found[name] = FOLDED
    return found


def warn_of_folded(file: str, names: Iterable[str]) -> None:
    """Warn that tensors are not trained, because the exporter computed them from others."""
    if listed := ", ".join(names):
        warnings.warn(
            f"{file}: the exporter computed {listed} from other tensors, and it is not trained. If one of "
            "them is a parameter, export with torch.onnx.export(…, optimize=False)",
            stacklevel=4,
        )


def refuse_merged(file: str, graph: onnx.GraphProto, trained: Iterable[str]) -> None:
    """Refuse a file in which a trained parameter stands for others, which had equal values when it was exported.

    The exporter's optimizer keeps one of several small initialisers that are equal, such as the ones of two fresh
    LayerNorms. As one tensor they would be trained as one.

    Raises:
        UserError: names the parameter and those that it stands for.
    """
    about = _metadata(graph)
    originals = {name: a[_ORIGINAL] for name, a in about.items() if _ORIGINAL in a}
    folded = {_as_input(n) for a in about.values() for n in re.findall(r"'([^']+)'", a.get(FOLDED, ""))}
    for node in _nodes(graph):
        line = {p.key: p.value for p in node.metadata_props}.get(_LINE, "")
        lines_inputs = dict.fromkeys(re.findall(r"%([pbc]_\w+)", line))
        lost = [n for n in lines_inputs if n not in folded and n not in originals.values()]
        lost = [n for n in lost if n not in {i.name for i in graph.input}]
        read = [n for n in node.input if n in originals]
        merged = [n for n in read if n in trained and (originals[n] not in lines_inputs or read.count(n) > 1)]
        if lost and merged:
            raise UserError(
                f"{file}: the exporter merged {merged[0]} with {', '.join(lost)}, which had equal values, so they "
                "would be trained as one. Export with torch.onnx.export(…, optimize=False)"
            )


def _metadata(graph: onnx.GraphProto) -> Mapping[str, Mapping[str, str]]:
    """The metadata of values, by name."""
    return {v.name: {p.key: p.value for p in v.metadata_props} for v in graph.value_info}


def _as_input(name: str) -> str:
    """The name of a parameter as an input of the exported program."""
    return "p_" + re.sub(r"\W", "_", name)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those inside other nodes too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)
