"""Compile StableHLO by XLA, as `jax.jit` does, and read the optimised program: its kernels, its memory, its FLOP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend
from jax.interpreters import mlir
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

_MAIN = "main"
# How XLA knows that a result may take the memory of an argument, as with `donate_argnums`.
_ALIAS = "tf.aliasing_output"

_WIDTHS = re.compile(r"(pred|bf16|token|[a-z]+?)(\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]")
_LINE = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<kind>\(.*?\)|\S+) (?P<operation>[\w-]+)\((?P<rest>.*)$"
)
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\) -> .* \{$")
_OPERAND = re.compile(r"%([\w.-]+)")
_SOURCE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"(?:to_apply|body|condition)=%([\w.-]+)|branch_computations=\{([^}]*)\}")

# Instructions of the entry computation that run nothing.
_NO_KERNELS = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id"})
_NESTED = frozenset({"call", "while", "conditional"})
# What XLA's CPU backend gives to Eigen, oneDNN or YNNPACK.
_LIBRARY = frozenset({"dot", "convolution", "custom-call"})


@dataclass(frozen=True)
class Call:
    """A call of a function of the module, in the order of the program.

    Attributes:
        function: the function's symbol.
        arguments: the name of each argument's value. A value that no earlier call made is an argument of the program.
        results: the name of each result's value. A later value replaces one of the same name.
    """

    function: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class HloKernel:
    """An instruction that XLA runs as a kernel.

    Attributes:
        name: the instruction.
        library: whether a library computes it.
        source: the name of the location that its root comes from; empty if unknown.
        read: the bytes of its operands.
        written: the bytes of its results.
        results: the bytes of each tensor that it writes and that is no result of the program.
        times: how often it runs.
    """

    name: str
    library: bool
    source: str
    read: int
    written: int
    results: tuple[int, ...]
    times: int


@dataclass(frozen=True)
class XlaProgram:
    """A program that XLA compiled.

    Attributes:
        arguments: the names of its arguments.
        results: the names of its results.
        kernels: what it runs.
        flops: arithmetic operations, by XLA's cost analysis.
        temporary_bytes: the bytes of its temporary buffers, which share memory.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    kernels: tuple[HloKernel, ...]
    flops: int
    temporary_bytes: int
    _executable: Any

    def __call__(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run the program; a value that is both an argument and a result is given away."""
        given = [values[name] for name in self.arguments]
        found = self._executable.execute_sharded(given).disassemble_into_single_device_arrays()
        return dict(zip(self.results, (arrays[0] for arrays in found), strict=True))


def on_device(array: np.ndarray[Any, Any]) -> Any:
    """An array on XLA's CPU device, of the dtype that it has."""
    with jax.enable_x64(True):
        return jax.device_put(array, jax.devices("cpu")[0])


def compile_chain(module: bytes, calls: Sequence[Call], results: Sequence[str]) -> XlaProgram:
    """Compile calls of functions of a StableHLO module, one after the other, as one program.

    Args:
        module: StableHLO, whose function `main`, if there is one, is replaced.
        calls: the calls.
        results: the values that the program returns. One that is an argument too takes its memory.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        arguments = _write_main(parsed, calls, results)
        code = mlir.module_to_bytecode(parsed)
    client = get_backend("cpu")
    devices = _jax.DeviceList(tuple(client.local_devices()[:1]))
    executable = client.compile_and_load(code, devices, xla_client.CompileOptions())
    memory = executable.get_compiled_memory_stats()
    (hlo,) = executable.hlo_modules()
    return XlaProgram(
        arguments,
        tuple(results),
        tuple(kernels_of(hlo.to_string())),
        int(executable.cost_analysis()["flops"]),
        memory.temp_size_in_bytes,
        executable,
    )


def _write_main(module: Any, calls: Sequence[Call], results: Sequence[str]) -> tuple[str, ...]:
    """Write the public function that makes the calls; return the names of its arguments."""
    functions = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in module.body.operations}
    if (empty := functions.pop(_MAIN, None)) is not None:
        empty.operation.erase()
    for function in functions.values():
        function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    types = {c.function: functions[c.function].attributes["function_type"].value for c in calls}
    arguments: dict[str, Any] = {}
    made: set[str] = set()
    for call in calls:
        kinds = dict(zip(call.arguments, types[call.function].inputs, strict=True))
        arguments = {n: k for n, k in kinds.items() if n not in made} | arguments
        made.update(call.results)
    returned = {n: k for c in calls for n, k in zip(c.results, types[c.function].results, strict=True)}
    kind = ir.FunctionType.get([*arguments.values()], [returned[n] for n in results])
    with ir.InsertionPoint(module.body):
        main = func.FuncOp(_MAIN, kind, visibility="public")
    block = main.add_entry_block()
    values: dict[str, Any] = dict(zip(arguments, block.arguments, strict=True))
    with ir.InsertionPoint(block):
        for call in calls:
            found = func.CallOp(types[call.function].results, call.function, [values[n] for n in call.arguments])
            values |= zip(call.results, found.results, strict=True)
        func.ReturnOp([values[n] for n in results])
    index = ir.IntegerType.get_signless(32)
    places = {name: number for number, name in enumerate(results)}
    aliases = [{_ALIAS: ir.IntegerAttr.get(index, places[n])} if n in places else {} for n in arguments]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in aliases])
    return tuple(arguments)


@dataclass(frozen=True)
class _Instruction:
    name: str
    kind: str
    operation: str
    operands: tuple[str, ...]
    text: str


@dataclass
class _Computation:
    instructions: dict[str, _Instruction]
    root: str = ""


def kernels_of(hlo: str) -> Iterator[HloKernel]:
    """The kernels of an optimised program, in the order of its text; those of a loop as often as it runs."""
    computations, entry = _computations(hlo)
    root = computations[entry].instructions[computations[entry].root]
    results = _made_by(computations[entry], set(root.operands) if root.operation == "tuple" else {root.name})
    yield from _kernels(computations, entry, results, 1)


def _made_by(computation: _Computation, names: set[str]) -> set[str]:
    """The instructions that make values, behind those that only give them another form."""
    made, waiting = set[str](), list(names)
    while waiting:
        one = computation.instructions[waiting.pop()]
        made.add(one.name)
        if one.operation in _NO_KERNELS:
            waiting += one.operands
    return made


def _kernels(computations: Mapping[str, _Computation], name: str, results: set[str], times: int) -> Iterator[HloKernel]:
    instructions = computations[name].instructions
    for one in instructions.values():
        if one.operation in _NESTED:
            trips = _TRIPS.search(one.text)
            inner = times * (int(trips[1]) if trips else 1)
            for called in _called(one.text):
                yield from _kernels(computations, called, set(), inner)
        elif one.operation not in _NO_KERNELS:
            source = _SOURCE.search(one.text)
            sizes = _sizes(one.kind)
            yield HloKernel(
                one.name,
                one.operation in _LIBRARY or "kind=kCustom" in one.text,
                source[1] if source else "",
                sum(sum(_sizes(instructions[o].kind)) for o in dict.fromkeys(one.operands)),
                sum(sizes),
                () if one.name in results else tuple(sizes),
                times,
            )


def _called(text: str) -> list[str]:
    found = [m[1] or m[2] for m in _CALLED.finditer(text)]
    return [name.strip().removeprefix("%") for names in found for name in names.split(",")]


def _computations(hlo: str) -> tuple[dict[str, _Computation], str]:
    """The computations of a program by name, and the name of its entry computation."""
    found: dict[str, _Computation] = {}
    entry, current = "", _Computation({})
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            current = found[header["name"]] = _Computation({})
            entry = header["name"] if header["entry"] else entry
        elif match := _LINE.match(line):
            name, rest = match["name"], match["rest"]
            operands = tuple(_OPERAND.findall(rest[: _end_of_operands(rest)]))
            current.instructions[name] = _Instruction(name, match["kind"], match["operation"], operands, rest)
            current.root = name if match["root"] else current.root
    return found, entry


def _end_of_operands(rest: str) -> int:
    """Where the parenthesis closes that is open before `rest`."""
    depth = 1
    for place, character in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return place
    return len(rest)


def _sizes(kind: str) -> list[int]:
    """The bytes of each tensor of a type."""
    return [_bytes(letters, bits, dimensions) for letters, bits, dimensions in _WIDTHS.findall(kind)]


def _bytes(letters: str, bits: str, dimensions: str) -> int:
    if letters == "token":
        return 0
    width = {"pred": 8, "bf16": 16}.get(letters) or int(bits)
    elements = int(np.prod([int(d) for d in dimensions.split(",") if d], dtype=np.int64))
    return -(-elements * width // 8)
