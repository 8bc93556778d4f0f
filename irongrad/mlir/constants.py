"""The values of tensors that a module computes from nothing but constants, such as masks of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from iree.compiler import ir

from irongrad.mlir.letters import dimensions_in
from irongrad.mlir.linalg import RESHAPES, inputs_of, is_elementwise, producer_of
from irongrad.mlir.walk import LOAD, STORE, global_of, inside

# The most elements of a tensor that is computed here.
_MOST = 1 << 24

# By MLIR's number of a comparison of signed integers: eq, ne, slt, sle, sgt, sge.
_COMPARED = dict(enumerate((np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)))

_COMPUTED: dict[str, Callable[..., Any]] = {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.addf": np.add,
    "arith.mulf": np.multiply,
    "arith.select": np.where,
}

_CONVERTED = frozenset(
    {"arith.index_cast", "arith.extsi", "arith.extui", "arith.uitofp", "arith.sitofp", "arith.extf", "arith.truncf"}
)

# What MLIR computes otherwise of bits than NumPy of truth values: a signed bit is -1.
_OF_NUMBERS = frozenset({"arith.addi", "arith.subi", "arith.muli", "arith.extsi", "arith.sitofp", "arith.cmpi"})

_DTYPES = {"i1": np.bool_, "i32": np.int32, "i64": np.int64, "index": np.int64, "f32": np.float32, "f64": np.float64}


class Constants:
    """Finds the values of constant tensors of a module."""

    def __init__(self, module: ir.Module) -> None:
        """Begin with what the initialisers of the module store in its globals."""
        operations = [op.operation for op in module.body]
        self._stored = {
            global_of(op): op.operands[0]
            for initialiser in operations
            if initialiser.name == "util.initializer"
            for op in inside(initialiser)
            if op.name == STORE
        }
        self._known: dict[Any, np.ndarray | None] = {}

    def value(self, tensor: Any) -> np.ndarray | None:
        """The value of a tensor; None if it depends on anything else than constants, or is not computed here."""
        if tensor not in self._known:
            self._known[tensor] = self._computed(tensor)
        return self._known[tensor]

    def _computed(self, tensor: Any) -> np.ndarray | None:
        name, kind = producer_of(tensor), tensor.type
        if name is None or not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
            return None
        if math.prod(kind.shape) > _MOST or str(kind.element_type) not in _DTYPES:
            return None
        owner = tensor.owner.operation
        if name == "arith.constant":
            return _dense(owner.attributes["value"], kind)
        if name == LOAD and "is_immutable" in owner.attributes and global_of(owner) in self._stored:
            return self.value(self._stored[global_of(owner)])
        if name in RESHAPES:
            source = self.value(owner.operands[0])
            return None if source is None else source.reshape(kind.shape)
        if name == "tensor.extract_slice":
            return self._slice(owner)
        return self._elementwise(owner) if is_elementwise(owner) and len(owner.results) == 1 else None

    def _slice(self, operation: Any) -> np.ndarray | None:
        source = self.value(operation.operands[0])
        if source is None or len(operation.operands) > 1:
            return None
        offsets, sizes, strides = (
            ir.DenseI64ArrayAttr(operation.attributes[f"static_{name}"]) for name in ("offsets", "sizes", "strides")
        )
        places = tuple(slice(o, o + n * step, step) for o, n, step in zip(offsets, sizes, strides, strict=True))
        return source[places].reshape(operation.results[0].type.shape)

    def _elementwise(self, operation: Any) -> np.ndarray | None:
        *maps, of_result = [m.value for m in operation.attributes["indexing_maps"]]
        shape = operation.results[0].type.shape
        block = operation.regions[0].blocks[0]
        if of_result != ir.AffineMap.get_identity(len(shape)) or list(block.arguments[-1].uses):
            return None
        known: dict[Any, Any] = {}
        for argument, value, indexing in zip(block.arguments, inputs_of(operation), maps, strict=False):
            given, loops = self.value(value), dimensions_in(indexing)
            if given is None or loops != sorted(set(loops)) or -1 in loops:
                return None
            known[argument] = given.reshape([n if d in loops else 1 for d, n in enumerate(shape)])
        for op in (op.operation for op in block):
            if op.name == "linalg.yield":
                result = _operand(op.operands[0], known)
                dtype = _DTYPES[str(operation.results[0].type.element_type)]
                return None if result is None else np.broadcast_to(result, shape).astype(dtype)
            given_all = [_operand(o, known) for o in op.operands]
            with np.errstate(all="ignore"):
                made = None if any(v is None for v in given_all) else _made(op, given_all, shape)
            if made is None:
                return None
            known[op.results[0]] = made
        return None


def _operand(value: Any, known: Mapping[Any, Any]) -> Any | None:
    """What is known of a value in the body of an operation; a constant may be outside of it."""
    if value in known:
        return known[value]
    if producer_of(value) != "arith.constant" or str(value.type) not in _DTYPES:
        return None
    return _DTYPES[str(value.type)](value.owner.attributes["value"].value)


def _made(operation: Any, given: list[Any], shape: list[int]) -> Any | None:
    """What an operation on numbers makes of arrays of them; None for one that is not known here."""
    dtype = _DTYPES.get(str(operation.results[0].type))
    if dtype is None or (operation.name in _OF_NUMBERS and any(np.asarray(v).dtype == np.bool_ for v in given)):
        return None
    if operation.name == "arith.constant":
        return dtype(operation.attributes["value"].value)
    if operation.name == "linalg.index":
        d = ir.IntegerAttr(operation.attributes["dim"]).value
        return np.arange(shape[d]).reshape([-1 if i == d else 1 for i in range(len(shape))])
    if operation.name == "arith.cmpi":
        compare = _COMPARED.get(ir.IntegerAttr(operation.attributes["predicate"]).value)
        return None if compare is None else compare(*given)
    if operation.name in _CONVERTED:
        return np.asarray(given[0]).astype(dtype)
    compute = _COMPUTED.get(operation.name)
    return None if compute is None else compute(*given)


def _dense(attribute: Any, kind: Any) -> np.ndarray | None:
    """The elements of a constant."""
    elements = ir.DenseElementsAttr(attribute)
    dtype = _DTYPES[str(kind.element_type)]
    if elements.is_splat:
        return np.full(kind.shape, elements.get_splat_value().value, dtype)
    return None if dtype is np.bool_ else np.array(elements).astype(dtype).reshape(kind.shape)
