"""Walking a module of IREE's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from iree.compiler import ir

# How many operations the code of an executable is, which says so itself.
OPERATIONS = "irongrad.operations"


LOOPS = frozenset({"scf.for", "scf.while"})

# Operands of an `scf.for` before those that it begins with: from where, to where, by how much.
BOUNDS = 3

# What reads a global, and what writes it.
LOAD, STORE = "util.global.load", "util.global.store"

# What IREE's phase `flow` leaves to be launched: the kernels, and those yet to come that pack operands of products.
PACKING = "flow.tensor.encode"
KERNELS = frozenset({"flow.dispatch", PACKING})


def bytecode_of(module: ir.Module) -> bytes:
    """A module as MLIR bytecode."""
    buffer = BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


@contextmanager
def parsed(source: bytes) -> Iterator[ir.Module]:
    """A module of which some operators may be unknown, from text or bytecode."""
    with ir.Context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        yield ir.Module.parse(source)


def functions_of(module: ir.Module) -> list[Any]:
    """The functions of a module."""
    return [op.operation for op in module.body.operations if op.operation.name == "util.func"]


def name_of(operation: Any) -> str:
    """The name of a function, or of a global."""
    return str(ir.StringAttr(operation.attributes["sym_name"]).value)


def global_of(operation: Any) -> str:
    """The name of the global that an operation loads or stores."""
    return str(ir.FlatSymbolRefAttr(operation.attributes["global"]).value)


def loaded(name: str, kind: ir.Type) -> Any:
    """What a global of type `kind` holds, read where operations are being inserted."""
    return ir.Operation.create(LOAD, [kind], attributes={"global": ir.FlatSymbolRefAttr.get(name)}).result


def text_of(operation: Any) -> str:
    """An operation as MLIR text, of its own alone: `str` numbers all values of the module that it is in, each time."""
    return str(operation.get_asm(use_local_scope=True, assume_verified=True))


def constant_of(value: Any) -> int | None:
    """The integer that `value` always is; None where that is not known."""
    owner = value.owner
    name = getattr(owner, "name", "")
    return ir.IntegerAttr(owner.attributes["value"]).value if name == "arith.constant" else None


def inside(operation: Any) -> Iterator[Any]:
    """All operations inside `operation`, in program order."""
    for region in operation.regions:
        for block in region:
            yield from inside_block(block)


def found_in(module: ir.Module, *names: str) -> list[Any]:
    """All operations of some names inside the functions of a module, in program order."""
    return [op for function in functions_of(module) for op in inside(function) if op.name in names]


def inside_block(block: Any) -> Iterator[Any]:
    """All operations inside `block`, in program order."""
    for inner in block:
        yield inner.operation
        yield from inside(inner.operation)


def around(block: Any) -> Iterator[Any]:
    """The operations that `block` is in, from the innermost."""
    owner = block.owner
    while owner is not None:
        yield owner.operation
        owner = owner.operation.parent


def loops_around(block: Any) -> list[Any]:
    """The loops that `block` is in, from the innermost."""
    return [op for op in around(block) if op.name in LOOPS]


def block_of(value: Any) -> Any:
    """The block that `value` is an argument or a result in."""
    return value.owner if isinstance(value.owner, ir.Block) else value.owner.operation.block


def owner_of(value: Any) -> Any:
    """The operation that `value` is a result of, or whose block's argument it is."""
    return value.owner.owner.operation if isinstance(value.owner, ir.Block) else value.owner.operation


def joined(timepoints: Sequence[Any], kind: ir.Type) -> Any:
    """A timepoint, made where operations are being inserted, that is reached when all of some are; at once, of none."""
    name = "stream.timepoint.join" if timepoints else "stream.timepoint.immediate"
    return ir.Operation.create(name, [kind], list(timepoints)).result


def outside_loops(operation: Any, values: Iterable[Any]) -> Any:
    """The outermost loop around `operation` that `values` are all from around; without one, `operation`."""
    outermost = operation
    for loop in loops_around(operation.block):
        if any(loop in around(block_of(value)) for value in values):
            break
        outermost = loop
    return outermost
