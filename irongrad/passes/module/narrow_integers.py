"""Compute a module's 64-bit integers in 32 bits, for devices without 64-bit integers.

Entry points and the state keep their types: only the functions of the step graph change. A function's arguments are cut
to their low words on entry, and its results are sign-extended on return. A value that does not fit into 32 bits becomes
the nearest value that does, so an index out of range stays out of range.

Numbers that need 64 bits, such as those of a random generator, would be wrong. So the pass refuses a constant of that
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from iree.compiler import ir

from irongrad.diagnostics.toolchain_errors import toolchain_error
from irongrad.mlir.integer_bounds import upper_bound
from irongrad.mlir.tools import run_tool
from irongrad.mlir.walk import bytecode_of, named_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.runtime.scratch import scratch_directory

_PASS = "--iree-input-conversion-demote-i64-to-i32"
_PREFIX = "graph."
# Entry points whose inputs are counters, apart from the state.
_COUNTERS = ("import_state", "import_gradients")
_NARROW = ".narrow"
_WIDEST, _INT32 = np.iinfo(np.int64), np.iinfo(np.int32)
# Initial values of reductions and absent indices are the limits of int64; they become the limits of int32.
_LIMITS = {int(_WIDEST.min): int(_INT32.min), int(_WIDEST.max): int(_INT32.max)}


@dataclass(frozen=True)
class NarrowIntegers(ModulePass):
    """Compute in 32-bit integers inside the step's functions, which keep their signatures.

    Before:
        func.func @graph.joint(%y: tensor<4xi64>) -> tensor<f32> { ... i64 ... }
    After:
        func.func @graph.joint(%y: tensor<4xi64>) -> tensor<f32> { %n = saturated %y; call @graph.joint.narrow(%n) }
        func.func @graph.joint.narrow(%y: tensor<4xi32>) -> tensor<f32> { ... i32 ... }

    Attributes:
        unbounded: inputs that may hold any 64-bit integer, for which the pass refuses the module.
        target: the target's name, for that message.

    Raises:
        UnsupportedOpError: an input is unbounded, a constant does not fit into 32 bits, or sizes vary.
        ToolchainError: IREE cannot change the types.
    """

    name: ClassVar[str] = "narrow-integers"
    required: ClassVar[str] = "the device has no 64-bit integers"

    unbounded: tuple[str, ...] = ()
    target: str = ""

    @classmethod
    def of_context(cls, context: ModuleContext) -> Self:
        """The pass for the inputs of the entry points; counters have no bound, but they fit into 32 bits."""
        computing = [e for e in context.entry_points if e.name not in _COUNTERS]
        inputs = [s for e in computing for s in e.inputs if s.dtype == "int64" and s.minimum is None]
        return cls(tuple(s.name for s in inputs), context.target.name)

    def applies(self, context: ModuleContext) -> bool:
        """For devices without 64-bit integers."""
        return not context.target.integers64

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        if self.unbounded:
            raise UnsupportedOpError(
                f"the input {self.unbounded[0]!r} holds 64-bit integers that are more than indices, and the devices of "
                f"the target {self.target!r} have none. Make it int32, or compile for vulkan:profile=desktop"
            )
        kinds = {name: f.type for name, f in _functions(module).items()}
        narrow = ir.Module.parse(_narrowed(_graph_alone(bytecode_of(module))))
        _check_static(kinds)
        wrapped = {n: k for n, k in kinds.items() if any(map(_is_wide, (*k.inputs, *k.results)))}
        wrappers = ir.Module.parse("\n".join(_wrappers(wrapped, _functions(narrow))))
        for function in _functions(module).values():
            function.operation.erase()
        _append_renamed(_functions(wrappers), module, {n: n for n in wrapped})
        _append_renamed(_functions(narrow), module, {n: n + _NARROW if n in wrapped else n for n in kinds})
        return PassResult(True, {"functions": len(kinds)})


def _check_static(kinds: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        if any(_is_wide(part) and not part.has_static_shape for part in (*kind.inputs, *kind.results)):
            raise UnsupportedOpError(
                f"{name.removeprefix(_PREFIX)} takes or gives int64 tensors of varying sizes, which cannot be computed "
                "in 32 bits yet. Give the dimensions buckets, or compile for vulkan:profile=desktop"
            )


def _functions(module: ir.Module) -> dict[str, Any]:
    """The functions of the step graph, by name."""
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    return {f.name.value: f for f in functions if f.name.value.startswith(_PREFIX)}


def _append_renamed(functions: dict[str, Any], module: ir.Module, names: dict[str, str]) -> None:
    for name, new in names.items():
        function = functions[name]
        function.operation.attributes["sym_name"] = ir.StringAttr.get(new)
        function.detach_from_parent()
        module.body.append(function)


def _graph_alone(bytecode: bytes) -> bytes:
    """The functions of the step graph alone: constants fit into 32 bits, the called scalar function is declared."""
    module = ir.Module.parse(bytecode)
    kept = _functions(module).values()
    for operation in list(module.body.operations):
        if operation not in kept:
            operation.operation.erase()
    declared = ir.Module.parse("func.func private @float32_of(f64) -> f32")
    (declaration,) = declared.body.operations
    declaration.detach_from_parent()
    module.body.append(declaration)
    for constant in named_in(module, "arith.constant"):
        _fit(constant)
    for shift in named_in(module, "arith.shrui", "arith.shrsi", "arith.shli"):
        _replace_high_word(shift)
    return bytecode_of(module)


def _replace_high_word(shift: ir.Operation) -> None:
    """Replace the high word of a counter by zero, if the counter fits into the low word.

    Raises:
        UnsupportedOpError: a number that may need 64 bits is shifted by at least a word.
    """
    wide = ir.IntegerType.get_signless(64)
    count = shift.operands[1]
    if count.type != wide or isinstance(count, ir.BlockArgument) or count.owner.name != "arith.constant":
        return
    by = ir.IntegerAttr(count.owner.attributes["value"]).value
    if by < 32:
        return
    bound = upper_bound(shift.operands[0])
    if bound is None or bound > _INT32.max or shift.name == "arith.shli":
        raise UnsupportedOpError(
            f"the step shifts a number by {by}, which needs 64-bit integers, and the target's devices have none. "
            "Random generators do this. Compile the step for vulkan:profile=desktop. The shift comes from "
            f"{shift.location}"
        )
    with ir.InsertionPoint(shift), shift.location:
        zero = ir.Operation.create("arith.constant", [wide], attributes={"value": ir.IntegerAttr.get(wide, 0)})
    shift.result.replace_all_uses_with(zero.result)
    shift.erase()


def _fit(constant: ir.Operation) -> None:
    """Replace 64-bit integers in a constant by values that fit into 32 bits."""
    value = constant.attributes["value"]
    if isinstance(value, ir.IntegerAttr) and value.type == ir.IntegerType.get_signless(64):
        constant.attributes["value"] = ir.IntegerAttr.get(value.type, int(_fitting([value.value], constant)[0]))
    elif isinstance(value, ir.DenseIntElementsAttr) and _is_wide(value.type):
        if value.is_splat:
            single = ir.IntegerAttr(value.get_splat_value())
            fitting = ir.IntegerAttr.get(single.type, int(_fitting([single.value], constant)[0]))
            constant.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, fitting)
        else:
            numbers = _fitting(list(value), constant).reshape(value.type.shape)
            constant.attributes["value"] = ir.DenseElementsAttr.get(numbers, type=value.type)


def _fitting(values: Sequence[int], constant: ir.Operation) -> np.ndarray[Any, Any]:
    numbers = np.array([_LIMITS.get(v, v) for v in values], np.int64)
    if numbers.size and not (_INT32.min <= numbers.min() and numbers.max() <= _INT32.max):
        raise UnsupportedOpError(
            f"the step computes with {max(values, key=abs)}, which needs 64-bit integers, and the target's devices "
            "have none. Random generators do this. Compile the step for vulkan:profile=desktop. The number comes from "
            f"{constant.location}"
        )
    return numbers


def _narrowed(bytecode: bytes) -> bytes:
    with scratch_directory() as folder:
        source = folder / "functions.mlirbc"
        source.write_bytes(bytecode)
        output = source.with_name("narrow.mlirbc")
        result = run_tool("iree-opt", [_PASS, "--emit-bytecode", str(source), "-o", str(output)])
        if result.returncode != 0:
            raise toolchain_error("iree-opt", result, source)
        return output.read_bytes()


def _is_wide(kind: ir.Type) -> bool:
    return isinstance(kind, ir.RankedTensorType) and kind.element_type == ir.IntegerType.get_signless(64)


def _wrappers(functions: dict[str, Any], narrow: dict[str, Any]) -> Iterator[str]:
    """MLIR of functions with the original types, each of which calls its narrow function."""
    for name, kind in functions.items():
        inner = narrow[name].type
        yield f'func.func private @"{name}{_NARROW}"({_list(inner.inputs)}) -> ({_list(inner.results)})'
        arguments = ", ".join(f"%a{i}: {k}" for i, k in enumerate(kind.inputs))
        yield f'func.func private @"{name}"({arguments}) -> ({_list(kind.results)}) {{'
        passed = [f"%a{i}" for i in range(len(kind.inputs))]
        for index, part in enumerate(kind.inputs):
            if _is_wide(part):
                yield from _cut(passed[index], part)
                passed[index] += ".cut"
        returned = [f"%r#{i}" for i in range(len(kind.results))]
        result = f"%r:{len(returned)} = " if returned else ""
        types = f"({_list(inner.inputs)}) -> ({_list(inner.results)})"
        yield f'  {result}func.call @"{name}{_NARROW}"({", ".join(passed)}) : {types}'
        for index, part in enumerate(kind.results):
            if _is_wide(part):
                yield from _extended(returned[index], f"%w{index}", part)
                returned[index] = f"%w{index}"
        yield f"  return {', '.join(returned)} : {_list(kind.results)}" if returned else "  return"
        yield "}"


def _list(kinds: Sequence[ir.Type]) -> str:
    return ", ".join(map(str, kinds))


def _shape(dims: Sequence[int], element: str) -> str:
    return f"tensor<{''.join(f'{d}x' for d in dims)}{element}>"


def _words(dims: Sequence[int], word: int) -> str:
    """The slice with the low (0) or high (1) words of integers, which are bitcast to pairs with the low word first."""
    offsets = ", ".join(["0"] * len(dims) + [str(word)])
    sizes, ones = ", ".join([*map(str, dims), "1"]), ", ".join(["1"] * (len(dims) + 1))
    return f"[{offsets}] [{sizes}] [{ones}]"


def _cut(value: str, kind: ir.Type) -> Iterator[str]:
    """MLIR that converts `value` to 32 bits; the result is named `<value>.cut`."""
    dims = list(kind.shape)
    pairs, single = _shape([*dims, 2], "i32"), _shape(dims, "i32")
    yield f"  {value}.pairs = flow.tensor.bitcast {value} : {kind} -> {pairs}"
    for word, name in enumerate(("low", "high")):
        yield f"  {value}.{name} = tensor.extract_slice {value}.pairs{_words(dims, word)} : {pairs} to {single}"
    yield f"  {value}.empty = tensor.empty() : {single}"
    yield f"  {value}.cut = linalg.generic {_elementwise(dims, 3)}"
    yield f"      ins({value}.low, {value}.high : {single}, {single}) outs({value}.empty : {single}) {{"
    yield "  ^bb0(%low: i32, %high: i32, %out: i32):"
    yield "    %c31 = arith.constant 31 : i32"
    yield "    %sign = arith.shrsi %low, %c31 : i32"
    yield "    %fits = arith.cmpi eq, %sign, %high : i32"
    yield f"    %largest = arith.constant {_INT32.max} : i32"
    yield "    %negative = arith.shrsi %high, %c31 : i32"
    yield "    %limit = arith.xori %largest, %negative : i32"  # the largest, or its complement: the smallest
    yield "    %cut = arith.select %fits, %low, %limit : i32"
    yield "    linalg.yield %cut : i32"
    yield f"  }} -> {single}"


def _extended(value: str, result: str, kind: ir.Type) -> Iterator[str]:
    """MLIR that sign-extends the 32-bit `value` to 64 bits, as `result`."""
    dims = list(kind.shape)
    pairs, single = _shape([*dims, 2], "i32"), _shape(dims, "i32")
    yield f"  {result}.empty = tensor.empty() : {single}"
    yield f"  {result}.high = linalg.generic {_elementwise(dims, 2)}"
    yield f"      ins({value} : {single}) outs({result}.empty : {single}) {{"
    yield "  ^bb0(%low: i32, %out: i32):"
    yield "    %c31 = arith.constant 31 : i32"
    yield "    %sign = arith.shrsi %low, %c31 : i32"
    yield "    linalg.yield %sign : i32"
    yield f"  }} -> {single}"
    yield f"  {result}.none = tensor.empty() : {pairs}"
    for word, (name, source, whole) in enumerate(
        [("half", value, f"{result}.none"), ("pairs", f"{result}.high", f"{result}.half")]
    ):
        at = f"{whole}{_words(dims, word)} : {single} into {pairs}"
        yield f"  {result}.{name} = tensor.insert_slice {source} into {at}"
    yield f"  {result} = flow.tensor.bitcast {result}.pairs : {pairs} -> {kind}"


def _elementwise(dims: Sequence[int], operands: int) -> str:
    names = ", ".join(f"d{i}" for i in range(len(dims)))
    maps = ", ".join([f"affine_map<({names}) -> ({names})>"] * operands)
    parallel = ", ".join(['"parallel"'] * len(dims))
    return f"{{indexing_maps = [{maps}], iterator_types = [{parallel}]}}"


PASS = NarrowIntegers
