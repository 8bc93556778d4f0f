"""Constant tensors of a graph, written inline into the module.

torch-mlir 20261001 stores their elements as resources beside the module. iree-compile 3.13.0 loses these resources if a
compilation stops at the VM dialect and resumes from there, as in `pipeline/iree/compile.py` ("resource data missing in
input IR").
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch_mlir.extras.fx_importer import TORCH_DTYPE_TO_MLIR_TYPE, FxImporterHooks, GraphNodeImporter, InputInfo
from torch_mlir.ir import DenseElementsAttr, FloatAttr, Operation, RankedTensorType, Value

# Dtypes whose elements MLIR reads from a numpy array.
_NUMPY_DTYPES = frozenset(
    {
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,  # booleans arrive as uint8, and the module converts them
    }
)


class SharedLiterals(GraphNodeImporter):
    """Imports a constant once, even if several operators use it.

    torch-mlir 20261001 looks up an imported constant by its name but stores it by its node. So a second use fails with
    "Node already has a value".
    """

    def _import_argument(self, loc: Any, arg: Any, expected_jit_type: Any = None) -> Value:
        if isinstance(arg, Node) and arg.op == "get_attr" and (arg, 0) in self._v:
            return self.resolve_node_value(arg)
        return super()._import_argument(loc, arg, expected_jit_type)


class InlineLiterals(FxImporterHooks):
    """Makes the importer write constants of several elements as dense attributes, as it does for single elements."""

    def resolve_literal(self, gni: GraphNodeImporter, literal: Any, info: InputInfo | None) -> Value | None:
        """The value of a constant tensor; None if the importer's own handling is right."""
        if not isinstance(literal, torch.Tensor) or literal.numel() < 2:
            return None
        type_ = gni._cc.tensor_to_vtensor_type(literal)
        attributes = {"value": _elements(literal)}
        return Operation.create("torch.vtensor.literal", results=[type_], attributes=attributes).result


def _elements(literal: torch.Tensor) -> DenseElementsAttr:
    values = literal.detach().cpu().contiguous()
    element = TORCH_DTYPE_TO_MLIR_TYPE[literal.dtype]()
    if literal.dtype not in _NUMPY_DTYPES:
        numbers = values.flatten().tolist()
        attributes = [FloatAttr.get(element, n) for n in numbers]
        return DenseElementsAttr.get(attributes, RankedTensorType.get(values.shape, element))
    array = values.numpy()
    return DenseElementsAttr.get(type=element, array=array, shape=array.shape)
