"""Constant tensors of a graph, written into the module itself.

torch-mlir 20261001 keeps their elements beside the module, as resources, which iree-compile 3.13.0 loses where it
stops at its VM dialect and goes on from there, as `compile.py` has it do ("resource data missing in input IR").
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch_mlir.extras.fx_importer import TORCH_DTYPE_TO_MLIR_TYPE, FxImporterHooks, GraphNodeImporter, InputInfo
from torch_mlir.ir import DenseElementsAttr, FloatAttr, Operation, RankedTensorType, Value

# Those whose elements MLIR takes from a numpy array.
_OF_NUMPY = frozenset(
    {
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,  # booleans come as these, and are converted in the module
    }
)


class SharedLiterals(GraphNodeImporter):
    """Imports a constant once however many operators take it.

    torch-mlir 20261001 looks for one that it has imported under its name and keeps it under its node, so that a second
    use ends with "Node already has a value".
    """

    def _import_argument(self, loc: Any, arg: Any, expected_jit_type: Any = None) -> Value:
        if isinstance(arg, Node) and arg.op == "get_attr" and (arg, 0) in self._v:
            return self.resolve_node_value(arg)
        return super()._import_argument(loc, arg, expected_jit_type)


class InlineLiterals(FxImporterHooks):
    """Has the importer write constants of several elements as dense attributes; it does so for single ones."""

    def resolve_literal(self, gni: GraphNodeImporter, literal: Any, info: InputInfo | None) -> Value | None:
        """The value of a constant tensor; None where the importer's own way is right."""
        if not isinstance(literal, torch.Tensor) or literal.numel() < 2:
            return None
        type_ = gni._cc.tensor_to_vtensor_type(literal)
        attributes = {"value": _elements(literal)}
        return Operation.create("torch.vtensor.literal", results=[type_], attributes=attributes).result


def _elements(literal: torch.Tensor) -> DenseElementsAttr:
    values = literal.detach().cpu().contiguous()
    element = TORCH_DTYPE_TO_MLIR_TYPE[literal.dtype]()
    if literal.dtype not in _OF_NUMPY:
        numbers = values.flatten().tolist()
        attributes = [FloatAttr.get(element, n) for n in numbers]
        return DenseElementsAttr.get(attributes, RankedTensorType.get(values.shape, element))
    array = values.numpy()
    return DenseElementsAttr.get(type=element, array=array, shape=array.shape)
