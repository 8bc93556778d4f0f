"""Constant tensors of a graph, written into the module itself.

torch-mlir 20261001 keeps their elements beside the module, as resources, which iree-compile 3.13.0 loses where it
stops at its VM dialect and goes on from there, as `compile.py` has it do ("resource data missing in input IR").
"""

from __future__ import annotations

from typing import Any

import torch
from torch_mlir.extras.fx_importer import TORCH_DTYPE_TO_MLIR_TYPE, FxImporterHooks, GraphNodeImporter, InputInfo
from torch_mlir.ir import DenseElementsAttr, Operation, Value

_WRITTEN = frozenset(
    {
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    }
)


class InlineLiterals(FxImporterHooks):
    """Has the importer write constants of several elements as dense attributes; it does so for single ones."""

    def resolve_literal(self, gni: GraphNodeImporter, literal: Any, info: InputInfo | None) -> Value | None:
        """The value of a constant tensor; None where the importer's own way is right."""
        if not isinstance(literal, torch.Tensor) or literal.numel() < 2 or literal.dtype not in _WRITTEN:
            return None
        array = literal.detach().cpu().contiguous().numpy()
        element = TORCH_DTYPE_TO_MLIR_TYPE[literal.dtype]()
        elements = DenseElementsAttr.get(type=element, array=array, shape=array.shape)
        type_ = gni._cc.tensor_to_vtensor_type(literal)
        return Operation.create("torch.vtensor.literal", results=[type_], attributes={"value": elements}).result
