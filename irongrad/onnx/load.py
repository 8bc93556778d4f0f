"""Load an ONNX file, and decide which of its tensors are trained, which are state, and which are options."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

import onnx
import torch
from onnx import inliner
from torch import nn

from irongrad.diagnostics.stage_errors import reported
from irongrad.onnx.dtypes import torch_dtype
from irongrad.onnx.graphs import Reader, names_of
from irongrad.onnx.model import Input, OnnxModel, module_of
from irongrad.onnx.registry import DOMAINS, Node, Static, operator_of, tensor, with_inner
from irongrad.runtime.errors import IronGradError, UserError

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
    "SoftmaxCrossEntropyLoss": {2},
    "NegativeLogLikelihoodLoss": {2},
}
# By operator, the positions of inputs whose numbers must be known without data.
_OPTIONS = {"Resize": {1, 2}, "Upsample": {1}}
# What the exporter of PyTorch says about an initialiser: `PARAMETER`, `BUFFER`, `CONSTANT_TENSOR`, or what it folded.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_PARAMETER = "PARAMETER"
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@reported(lambda: "reading the ONNX model")
def load(
    path: str | os.PathLike[str], *, freeze: Iterable[str] = (), outputs: Sequence[str] | None = None
) -> OnnxModel:
    """Load an ONNX file as a module that can be trained.

    Its parameters are what PyTorch's exporter calls parameters. If a file does not say what is one, they are the
    floating-point initialisers; statistics of BatchNormalization, class weights and other constants are buffers.
    Training mode restores what a model exported in evaluation mode leaves out, if the file still has these nodes:
    BatchNormalization uses and collects statistics of the batch, and Dropout drops.

    Args:
        path: the ONNX file.
        freeze: patterns of names, such as `encoder.*`, of initialisers that are not trained.
        outputs: the graph's outputs to compute, all by default; nodes that only other outputs need are left out.

    Raises:
        UserError: the file is not an ONNX file, or has no such output.
        UnsupportedOpError: an operator has no differentiable form here; names the node.
    """
    model = _read(Path(path))
    try:
        return from_proto(model, str(Path(path).resolve()), freeze=freeze, outputs=outputs)
    except IronGradError:
        raise
    except Exception:
        _refuse_malformed(model, path)
        raise


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
    said = _said_of(graph)
    uses = _uses(nodes)
    statics = {
        n: a
        for n, a in (arrays | constants).items()
        if (_is_static(a) and said.get(n) != _PARAMETER) or (n in constants and a.size == 1) or _is_option(uses[n])
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, array in (arrays | constants).items():
        if name in statics:
            continue
        value = _tensor(array, name, file)
        weight = said[name] == _PARAMETER if name in said else _is_weight(value, uses[name])
        trained = name in arrays and weight and value.dtype in _FLOATS and not any(fnmatchcase(name, p) for p in freeze)
        tensors[name] = nn.Parameter(value) if trained else value
    _warn_of_folded(file, [n for n in tensors if said.get(n) == _FOLDED])
    inputs = {i.name: _input(i) for i in graph.input if i.name not in arrays}
    read = {name for node in nodes for name in node.reads} | set(results)
    inputs = {n: taken for n, taken in inputs.items() if n in read}
    tensors = {n: t for n, t in tensors.items() if n in read}
    return module_of(file, inputs, nodes, results, statics, tensors)


def _input(value: onnx.ValueInfoProto) -> Input:
    tensor_type = value.type.tensor_type
    sizes = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor_type.shape.dim)
    return Input(sizes if tensor_type.HasField("shape") else None, torch_dtype(tensor_type.elem_type))


def _said_of(graph: onnx.GraphProto) -> dict[str, str]:
    """What the exporter says about initialisers, by name; what it folded from others is none of its parameters."""
    found = {}
    for value in graph.value_info:
        about = {p.key: p.value for p in value.metadata_props}
        if _KIND in about:
            found[value.name] = about[_KIND]
        elif _FOLDED in about:
            found[value.name] = _FOLDED
    return found


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except Exception as error:
        # onnx raises whatever its parts raise: DecodeError, ValueError, UnicodeDecodeError, and its own ValidationError
        # for external data that is missing or outside of the file's directory.
        raise UserError(f"{path} cannot be read as an ONNX file: {' '.join(str(error).split())}") from None


def _refuse_malformed(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Refuse a model that ONNX's own checker refuses; it is asked only when reading failed, for it is strict."""
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise UserError(f"{path} is no well-formed ONNX model: {' '.join(str(error).split())}") from None


def _is_static(array: Static) -> bool:
    """Return whether a tensor is known without data: every tensor that is not floating-point, and single numbers."""
    return array.ndim == 0 or array.dtype.kind in "iub" or array.dtype.kind not in "fV"


def _tensor(array: Static, name: str, file: str) -> torch.Tensor:
    if torch_dtype(onnx.helper.np_dtype_to_tensor_dtype(array.dtype)) is None:
        raise UserError(f"{file}: the initialiser {name!r} has elements of type {array.dtype}, which cannot be trained")
    return tensor(array)


def _warn_of_folded(file: str, names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"{file}: the exporter computed {', '.join(names)} from other tensors, and it is not trained. If one of "
            "them is a parameter, export with torch.onnx.export(…, optimize=False)",
            stacklevel=3,
        )


Uses: TypeAlias = Sequence[tuple[str, int]]


def _uses(nodes: Sequence[Node]) -> Mapping[str, Uses]:
    """For each value, the operators and positions where it is an input."""
    found = defaultdict[str, list[tuple[str, int]]](list)
    for node in with_inner(nodes):
        for place, name in enumerate(node.inputs):
            found[name].append((node.operator, place))
    return found


def _is_option(uses: Uses) -> bool:
    """Return whether a tensor is nothing but an option of operators."""
    return bool(uses) and all(place in _OPTIONS.get(operator, ()) for operator, place in uses)


def _is_weight(value: torch.Tensor, uses: Uses) -> bool:
    """Return whether an initialiser can be trained: finite numbers that a node uses as more than an option."""
    if value.dtype not in _FLOATS or not bool(torch.isfinite(value).all()):
        return False
    if value.numel() == 1 and all(operator == "Where" for operator, _ in uses):
        return False  # a number for what is masked
    return any(place not in _NO_WEIGHTS.get(operator, ()) for operator, place in uses)
