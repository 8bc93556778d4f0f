"""Compute a module's float64 scalars in IREE's virtual machine instead of on the device.

Hyperparameters are float64, and so is the arithmetic on them (`1 - beta1 ** step`). SPIR-V has neither logarithm nor
power of float64 (the GLSL.std.450 specification: `Pow` and `Log` take 16- and 32-bit floats), and many devices have no
float64 at all. The virtual machine has both. So the pass moves each operation that takes or returns a rank-0 float64
tensor out of its `linalg.generic`. A kernel that only rounds such a tensor to float32 reads the rounded scalar instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir
from iree.compiler.dialects import arith, func, tensor

from irongrad.mlir.linalg import GENERIC
from irongrad.mlir.walk import named_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

# The virtual machine of IREE 3.13.0 cannot round a float64 to float32, so this function rounds the bits (IEEE 754, to
# nearest, ties to even). Below float32's smallest normal number, 2**-126, adding 2**-97 rounds to multiples of 2**-149.
_ROUND = """
func.func private @float32_of(%x: f64) -> f32 {
  %magnitude = math.absf %x : f64
  %wide = arith.bitcast %magnitude : f64 to i64
  %c29 = arith.constant 29 : i64
  %one = arith.constant 1 : i64
  %half = arith.constant 0x0fffffff : i64
  %kept = arith.shrui %wide, %c29 : i64
  %odd = arith.andi %kept, %one : i64
  %up = arith.addi %half, %odd : i64
  %sum = arith.addi %wide, %up : i64
  %shifted = arith.shrui %sum, %c29 : i64
  %bias = arith.constant 0x1C0000000 : i64
  %normal = arith.subi %shifted, %bias : i64
  %infinity = arith.constant 0x7f800000 : i64
  %finite = arith.minsi %normal, %infinity : i64
  %nan = arith.constant 0x7fc00000 : i64
  %is_nan = arith.cmpf uno, %x, %x : f64
  %large = arith.select %is_nan, %nan, %finite : i64
  %magic = arith.constant 6.310887241768095e-30 : f64
  %added = arith.addf %magnitude, %magic : f64
  %units = arith.bitcast %added : f64 to i64
  %zero = arith.bitcast %magic : f64 to i64
  %small = arith.subi %units, %zero : i64
  %smallest = arith.constant 1.1754943508222875e-38 : f64
  %is_small = arith.cmpf olt, %magnitude, %smallest : f64
  %bits = arith.select %is_small, %small, %large : i64
  %signed = arith.bitcast %x : f64 to i64
  %c32 = arith.constant 32 : i64
  %top = arith.shrui %signed, %c32 : i64
  %mask = arith.constant 0x80000000 : i64
  %sign = arith.andi %top, %mask : i64
  %all = arith.ori %bits, %sign : i64
  %narrow = arith.trunci %all : i64 to i32
  %rounded = arith.bitcast %narrow : i32 to f32
  return %rounded : f32
}
"""


@dataclass(frozen=True)
class ScalarsOnHost(ModulePass):
    """Compute float64 scalars in IREE's virtual machine, and hand them to the device as float32.

    Before:
        %r = linalg.generic ins(%lr, %beta : tensor<f64>, tensor<f64>) { arith.mulf ... }
    After:
        %a = tensor.extract %lr[]; %b = tensor.extract %beta[]; %m = arith.mulf %a, %b; %r = tensor.from_elements %m

    A kernel that only rounds such a scalar to float32 reads the rounded scalar instead.
    """

    name: ClassVar[str] = "scalars-on-host"
    required: ClassVar[str] = "the device has no float64"

    def applies(self, context: ModuleContext) -> bool:
        """For devices whose code has no float64 arithmetic."""
        return context.target.scalars_on_host

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        helpers = ir.Module.parse(_ROUND)  # a name keeps the module alive, which owns its operations
        for helper in list(helpers.body.operations):
            helper.detach_from_parent()
            module.body.append(helper)
        moved = 0
        for operation in filter(_mentions_float64, named_in(module, GENERIC, "linalg.fill")):
            with operation.location:
                if _is_scalar(operation):
                    _compute_on_host(operation)
                    moved += 1
                else:
                    _round_operands(operation)
                    _round_constants(operation)
        return PassResult(True, {"moved": moved})


def _mentions_float64(operation: ir.Operation) -> bool:
    body = operation.regions[0].blocks[0]
    values = [*operation.operands, *operation.results, *body.arguments]
    values += [v for inner in body.operations for v in (*inner.operation.operands, *inner.operation.results)]
    return any(_is_float64(v.type) for v in values)


def _is_float64(kind: ir.Type) -> bool:
    element = kind.element_type if isinstance(kind, ir.RankedTensorType) else kind
    return isinstance(element, ir.F64Type)


def _is_rank_0(kind: ir.Type) -> bool:
    return isinstance(kind, ir.RankedTensorType) and kind.rank == 0


def _is_scalar(operation: ir.Operation) -> bool:
    return all(_is_rank_0(r.type) for r in operation.results) and not any(
        isinstance(v.type, ir.RankedTensorType) and v.type.rank for v in operation.operands
    )


def _compute_on_host(operation: ir.Operation) -> None:
    """Replace `operation`, which is on tensors of rank 0, by operations on scalars."""
    block = operation.regions[0].blocks[0]
    with ir.InsertionPoint(operation):
        values = {a: _element(o) for a, o in zip(block.arguments, operation.operands, strict=True) if list(a.uses)}
        *computed, end = (o.operation for o in block.operations)
        for inner in computed:
            if inner.name == "arith.truncf":
                values[inner.results[0]] = _rounded(values.get(inner.operands[0], inner.operands[0]))
                continue
            if inner.name == "arith.uitofp" and inner.operands[0].type == ir.IntegerType.get_signless(1):
                values[inner.results[0]] = _number_of(values.get(inner.operands[0], inner.operands[0]))
                continue
            copied = inner.clone()
            for index, operand in enumerate(inner.operands):
                copied.operands[index] = values.get(operand, operand)
            values |= dict(zip(inner.results, copied.results, strict=True))
        for result, value in zip(operation.results, end.operands, strict=True):
            result.replace_all_uses_with(_tensor(values.get(value, value)))
    operation.erase()


def _number_of(flag: ir.Value) -> ir.Value:
    """A boolean as float64: 1.0 for true and 0.0 for false.

    The virtual machine of IREE 3.13.0 converts the boolean to float32 (`UIToFPOpConversion` in its
    ArithToVM/Patterns.cpp), so a select replaces the conversion.
    """
    kind = ir.F64Type.get()
    one, zero = (arith.constant(kind, value) for value in (1.0, 0.0))
    return arith.SelectOp(flag, one, zero).result


def _element(value: ir.Value) -> ir.Value:
    """The scalar that a tensor of rank 0 holds."""
    if not isinstance(value.type, ir.RankedTensorType):
        return value
    if not isinstance(value, ir.BlockArgument) and value.owner.name in ("tensor.from_elements", "flow.tensor.splat"):
        return value.owner.operands[0]
    return tensor.ExtractOp(value, []).result


def _tensor(value: ir.Value) -> ir.Value:
    """A tensor of rank 0 that holds `value`.

    IREE moves a `tensor.from_elements` to the device, with all arithmetic that it depends on, but not a
    `flow.tensor.splat`.
    """
    kind = ir.RankedTensorType.get([], value.type)
    if isinstance(value.type, ir.F64Type):
        return tensor.FromElementsOp(kind, [value]).result
    return ir.Operation.create("flow.tensor.splat", [kind], [value]).result


def _round_operands(operation: ir.Operation) -> None:
    """Pass scalars as float32 to `operation` if it only rounds them to float32."""
    block = operation.regions[0].blocks[0]
    for index, argument in enumerate(block.arguments):
        operand = operation.operands[index]
        users = [use.owner for use in argument.uses]
        if not (_is_float64(argument.type) and _is_rank_0(operand.type) and _all_round(users)):
            continue
        with ir.InsertionPoint(operation):
            operation.operands[index] = _tensor(_rounded(_element(operand)))
        argument.set_type(ir.F32Type.get())
        for user in users:
            user.operation.results[0].replace_all_uses_with(argument)
            user.operation.erase()


def _rounded(value: ir.Value) -> ir.Value:
    """Round a float64 to the nearest float32."""
    return func.CallOp([ir.F32Type.get()], "float32_of", [value]).results[0]


def _all_round(users: Sequence[ir.OpView]) -> bool:
    return all(
        user.operation.name == "arith.truncf" and isinstance(user.operation.results[0].type, ir.F32Type)
        for user in users
    )


def _round_constants(operation: ir.Operation) -> None:
    """Fold roundings of constants; compare a widened float32 with a constant in float32 if the constant is exact."""
    for inner in [o.operation for o in operation.regions[0].blocks[0].operations]:
        if inner.name == "arith.truncf" and (value := _constant(inner.operands[0])) is not None:
            with ir.InsertionPoint(inner):
                inner.results[0].replace_all_uses_with(arith.constant(inner.results[0].type, value))
            inner.erase()
        elif inner.name == "arith.cmpf":
            _compare_narrow(inner)


def _compare_narrow(compare: ir.Operation) -> None:
    left, right = compare.operands
    value = _constant(right)
    widened = left.owner if not isinstance(left, ir.BlockArgument) else None
    if value is None or widened is None or widened.name != "arith.extf":
        return
    kind = widened.operands[0].type
    if not isinstance(kind, ir.F32Type) or ir.FloatAttr.get(kind, value).value != value:
        return
    with ir.InsertionPoint(compare):
        compare.operands[1] = arith.constant(kind, value)
    compare.operands[0] = widened.operands[0]


def _constant(value: ir.Value) -> float | None:
    """The value of a floating-point constant; None for any other value."""
    if isinstance(value, ir.BlockArgument) or value.owner.name != "arith.constant":
        return None
    attribute = value.owner.attributes["value"]
    return float(attribute.value) if isinstance(attribute, ir.FloatAttr) else None


PASS = ScalarsOnHost
