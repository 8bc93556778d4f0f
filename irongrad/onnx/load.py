"""Load an ONNX file, and decide which of its tensors are trained, which are state, and which are options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import inliner
from torch import nn

from irongrad.diagnostics.stage_errors import reported
from irongrad.onnx.dtypes import torch_dtype
from irongrad.onnx.graphs import Reader, names_of
from irongrad.onnx.model import OnnxModel, Shape, module_of
from irongrad.onnx.registry import DOMAINS, Node, Static, operator_of, tensor, with_inner
from irongrad.runtime.errors import UserError

# By operator, the positions of inputs that are numbers to compute with, not weights.
_NO_WEIGHTS = {
    "BatchNormalization": {3, 4},
    "Clip": {1, 2},
    "Dropout": {1},
    "OneHot": {2},
    "Pad": {2},
    "Range": {0, 1, 2},
    "Resize": {1, 2},
    "RotaryEmbedding": {1, 2},
    "Upsample": {1},
    "Where": {1, 2},
}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@reported(lambda: "reading the ONNX model")
def load(
    path: str | os.PathLike[str], *, freeze: Iterable[str] = (), outputs: Sequence[str] | None = None
) -> OnnxModel:
    """Load an ONNX file as a module that can be trained.

    Its parameters are the floating-point initialisers. Statistics of BatchNormalization and other constants are
    buffers. Training mode restores what a model exported in evaluation mode leaves out, if the file still has these
    nodes: BatchNormalization uses and collects statistics of the batch, and Dropout drops.

    Args:
        path: the ONNX file.
        freeze: patterns of names, such as `encoder.*`, of initialisers that are not trained.
        outputs: the graph's outputs to compute, all by default; nodes that only other outputs need are left out.

    Raises:
        UserError: the file is not an ONNX file, or has no such output.
        UnsupportedOpError: an operator has no differentiable form here; names the node.
    """
    return from_proto(_read(Path(path)), str(Path(path).resolve()), freeze=freeze, outputs=outputs)


def from_proto(
    model: onnx.ModelProto,
    file: str = "model.onnx",
    *,
    freeze: Iterable[str] = (),
    outputs: Sequence[str] | None = None,
) -> OnnxModel:
    """Build the module of an ONNX model in memory, as `load` does; messages call the model `file`."""
    model = inliner.inline_local_functions(model)
    opset = next((o.version for o in model.opset_import if o.domain in DOMAINS), 1)
    graph = model.graph
    there = [o.name for o in graph.output]
    results = list(outputs) if outputs is not None else there
    if unknown := [o for o in results if o not in there]:
        raise UserError(f"{file} has no output {unknown[0]!r}; it has {', '.join(there)}")
    reader = Reader(opset, file, taken=names_of(graph))
    nodes = reader.nodes(graph, results)
    for node in with_inner(nodes):
        operator_of(node)
    arrays, constants = reader.initializers, reader.constants
    statics = {n: a for n, a in (arrays | constants).items() if _is_static(a) or (n in constants and a.size == 1)}
    tensors: dict[str, torch.Tensor] = {}
    for name, array in (arrays | constants).items():
        if name in statics:
            continue
        value = _tensor(array, name, file)
        trained = name in arrays and _is_weight(name, value, nodes) and not any(fnmatchcase(name, p) for p in freeze)
        tensors[name] = nn.Parameter(value) if trained else value
    inputs = {i.name: _shape(i) for i in graph.input if i.name not in arrays}
    read = {name for node in nodes for name in node.reads} | set(results)
    inputs = {n: shape for n, shape in inputs.items() if n in read}
    tensors = {n: t for n, t in tensors.items() if n in read}
    return module_of(file, inputs, nodes, results, statics, tensors)


def _shape(value: onnx.ValueInfoProto) -> Shape:
    tensor_type = value.type.tensor_type
    if not tensor_type.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor_type.shape.dim)


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except (OSError, DecodeError) as error:
        raise UserError(f"{path} cannot be read as an ONNX file: {error}") from None


def _is_static(array: Static) -> bool:
    """Return whether a tensor is known without data: every tensor that is not floating-point, and single numbers."""
    return array.ndim == 0 or array.dtype.kind in "iub" or array.dtype.kind not in "fV"


def _tensor(array: Static, name: str, file: str) -> torch.Tensor:
    if torch_dtype(onnx.helper.np_dtype_to_tensor_dtype(array.dtype)) is None:
        raise UserError(f"{file}: the initialiser {name!r} has elements of type {array.dtype}, which cannot be trained")
    return tensor(array)


def _is_weight(name: str, value: torch.Tensor, nodes: Sequence[Node]) -> bool:
    """Return whether an initialiser can be trained: finite numbers that a node uses as more than an option."""
    if value.dtype not in _FLOATS or not bool(torch.isfinite(value).all()):
        return False
    uses = [(n.operator, i) for n in with_inner(nodes) for i, given in enumerate(n.inputs) if given == name]
    return any(i not in _NO_WEIGHTS.get(operator, ()) for operator, i in uses)
