"""Load an ONNX file, and decide which of its tensors are trained, which are state, and which are options."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

import onnx
import torch
from onnx import inliner
from torch import nn

from irongrad.diagnostics.stage_errors import reported_as
from irongrad.onnx.dtypes import torch_dtype
from irongrad.onnx.exporter import (
    FOLDED,
    PARAMETER,
    is_of_module,
    is_older,
    refuse_merged,
    said_of,
    separate_equal,
    warn_of_folded,
)
from irongrad.onnx.graphs import Reader, names_of
from irongrad.onnx.model import Input, OnnxModel, module_of
from irongrad.onnx.registry import DOMAINS, Node, Static, operator_of, tensor, with_inner
from irongrad.onnx.static import has_rule
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
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@reported_as("reading the ONNX model")
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
    if model.functions:  # the inliner cannot take models of more than 2 GiB
        model = inliner.inline_local_functions(model)
    if model.graph.sparse_initializer:
        raise UserError(f"{file} has sparse initialisers, which are not trained. Export the model with dense ones")
    opset = next((o.version for o in model.opset_import if o.domain in DOMAINS), 1)
    graph, older = model.graph, is_older(model)
    if older:
        separate_equal(graph)
    there = [o.name for o in graph.output]
    results = list(outputs) if outputs is not None else there
    if unknown := [o for o in results if o not in there]:
        raise UserError(f"{file} has no output {unknown[0]!r}; it has {', '.join(there)}")
    reader = Reader(opset, file, taken=names_of(graph))
    nodes = reader.nodes(graph, results)
    for node in with_inner(nodes):
        operator_of(node)
    arrays, constants = reader.initializers, reader.constants
    kinds = _Kinds(said_of(graph), older, _uses(nodes), set(constants), tuple(freeze))
    values = arrays | constants
    statics = {name: array for name, array in values.items() if kinds.is_known(name, array)}
    tensors: dict[str, torch.Tensor] = {}
    for name, array in values.items():
        if name not in statics:
            value = _tensor(array, name, file)
            tensors[name] = nn.Parameter(value) if kinds.is_trained(name, value) else value
    refuse_merged(file, graph, {n for n, t in tensors.items() if isinstance(t, nn.Parameter)})
    warn_of_folded(file, [n for n in tensors if kinds.said.get(n) == FOLDED])
    inputs = {i.name: _input(i) for i in graph.input if i.name not in arrays}
    read = {name for node in nodes for name in node.reads} | set(results)
    inputs = {n: taken for n, taken in inputs.items() if n in read}
    tensors = {n: t for n, t in tensors.items() if n in read}
    return module_of(file, inputs, nodes, results, statics, tensors)


def _input(value: onnx.ValueInfoProto) -> Input:
    tensor_type = value.type.tensor_type
    sizes = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor_type.shape.dim)
    return Input(sizes if tensor_type.HasField("shape") else None, torch_dtype(tensor_type.elem_type))


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


def _tensor(array: Static, name: str, file: str) -> torch.Tensor:
    if torch_dtype(onnx.helper.np_dtype_to_tensor_dtype(array.dtype)) is None:
        raise UserError(f"{file}: the initialiser {name!r} has elements of type {array.dtype}, which cannot be trained")
    return tensor(array)


# For each value, the nodes and positions where it is an input.
Uses: TypeAlias = Mapping[str, Sequence[tuple[Node, int]]]


def _uses(nodes: Sequence[Node]) -> Uses:
    found = defaultdict[str, list[tuple[Node, int]]](list)
    for node in with_inner(nodes):
        for place, name in enumerate(node.inputs):
            found[name].append((node, place))
    return found


@dataclass(frozen=True)
class _Kinds:
    """What the tensors of a file are: known without data, trained, or state.

    Attributes:
        said: what the exporter says about initialisers, by name.
        older: whether PyTorch's older exporter wrote the file.
        uses: the nodes that read each value.
        constants: the names of the values of `Constant` nodes.
        freeze: patterns of names that are not trained.
    """

    said: Mapping[str, str]
    older: bool
    uses: Uses
    constants: Set[str]
    freeze: tuple[str, ...]

    def is_known(self, name: str, array: Static) -> bool:
        """Return whether a tensor is known without data: integers, most single numbers, and options of operators."""
        single = array.ndim == 0 and not self._is_single_parameter(name, array)
        known = single or array.dtype.kind not in "fV"
        if known and self.said.get(name) != PARAMETER:
            return True
        return (name in self.constants and array.size == 1) or self._is_option(name)

    def is_trained(self, name: str, value: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter."""
        weight = self.said[name] == PARAMETER if name in self.said else self._is_weight(name, value)
        kept = name in self.constants or value.dtype not in _FLOATS
        return weight and not kept and not any(fnmatchcase(name, pattern) for pattern in self.freeze)

    def _is_single_parameter(self, name: str, array: Static) -> bool:
        """Return whether a single number is trained: one of the module's own, such as the scale of a model's logits."""
        return self.older and is_of_module(name) and array.dtype.kind in "fV" and self._is_weight(name, tensor(array))

    def _is_option(self, name: str) -> bool:
        """Return whether a value is nothing but an option of operators, as it is or in values computed from it."""
        return bool(self.uses[name]) and all(
            place in _OPTIONS.get(node.operator, ())
            or (has_rule(node.operator) and all(map(self._is_option, node.outputs)))
            for node, place in self.uses[name]
        )

    def _is_weight(self, name: str, value: torch.Tensor) -> bool:
        """Return whether an initialiser can be trained: finite numbers that a node uses as more than an option."""
        if value.dtype not in _FLOATS or not bool(torch.isfinite(value).all()):
            return False
        uses = [(node.operator, place) for node, place in self.uses[name]]
        if value.numel() == 1 and all(operator == "Where" for operator, _ in uses):
            return False  # a number for what is masked
        return any(place not in _NO_WEIGHTS.get(operator, ()) for operator, place in uses)
