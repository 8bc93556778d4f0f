"""Walking and editing IREE modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from iree.compiler import ir

# Attribute of an executable with code of our own: how many arithmetic operations one launch executes.
OPERATIONS = "irongrad.operations"


LOOPS = frozenset({"scf.for", "scf.while"})

# How many operands an `scf.for` has before its initial values: lower bound, upper bound, step.
BOUNDS = 3

GLOBAL, LOAD, STORE = "util.global", "util.global.load", "util.global.store"

# Launches after IREE's phase `flow`. IREE later turns an encoding into a kernel that packs an operand of a product.
PACKING = "flow.tensor.encode"
KERNELS = frozenset({"flow.dispatch", PACKING})


# The dialects whose operations our code creates. tests/mlir/test_walk.py finds one that is missing.
_CREATED = (
    *(
        "affine",
        "arith",
        "builtin",
        "cf",
        "complex",
        "func",
        "linalg",
        "llvm",
        "math",
        "memref",
        "scf",
        "tensor",
        "vector",
    ),
    *("flow", "hal", "iree_encoding", "iree_linalg_ext", "iree_tensor_ext", "stream", "tm_tensor", "util", "vm"),
)


def new_context() -> ir.Context:
    """A context of IREE's dialects.

    The parser loads the dialects that it meets. Only those of our own operations are loaded before: to load all of them
    would take most of the time that it takes to read a small module.
    """
    return ir.Context(load_on_create_dialects=_CREATED)


def bytecode_of(module: ir.Module) -> bytes:
    """A module as MLIR bytecode."""
    buffer = BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


@contextmanager
def parsed(source: bytes) -> Iterator[ir.Module]:
    """Parse a module from MLIR text or bytecode, in a new context; unregistered dialects are allowed."""
    with new_context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        yield ir.Module.parse(source)


def functions_of(module: ir.Module) -> list[Any]:
    """The functions of a module."""
    return [op.operation for op in module.body.operations if op.operation.name == "util.func"]


def name_of(operation: Any) -> str:
    """The symbol name of a function or a global."""
    return str(ir.StringAttr(operation.attributes["sym_name"]).value)


def global_of(operation: Any) -> str:
    """The name of the global that an operation loads or stores."""
    return str(ir.FlatSymbolRefAttr(operation.attributes["global"]).value)


def loaded(name: str, kind: ir.Type) -> Any:
    """Load the global `name`, of type `kind`, at the current insertion point; return the value."""
    return ir.Operation.create(LOAD, [kind], attributes={"global": ir.FlatSymbolRefAttr.get(name)}).result


def text_of(operation: Any) -> str:
    """One operation as MLIR text; `str` would number all values of the enclosing module at each call."""
    return str(operation.get_asm(use_local_scope=True, assume_verified=True))


def constant_of(value: Any) -> int | None:
    """The integer that `value` is, if an `arith.constant` defines it; else None."""
    owner = value.owner
    name = getattr(owner, "name", "")
    return ir.IntegerAttr(owner.attributes["value"]).value if name == "arith.constant" else None


def inside(operation: Any) -> list[Any]:
    """All operations inside `operation`, in program order, as they are before a caller edits them."""
    found: list[Any] = []

    def visit(inner: Any) -> ir.WalkResult:
        found.append(inner)
        return ir.WalkResult.ADVANCE

    # MLIR's own walk takes half of the time of loops over regions, blocks, and views of operations.
    operation.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found[1:]


def found_in(module: ir.Module, *names: str) -> list[Any]:
    """All operations inside the functions of a module whose name is one of `names`, in program order."""
    return [op for function in functions_of(module) for op in inside(function) if op.name in names]


def named_in(module: ir.Module, *names: str) -> list[ir.Operation]:
    """All operations of a module whose name is one of `names`, each after the operations inside it."""
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in names:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def inside_block(block: Any) -> Iterator[Any]:
    """All operations inside `block`, in program order."""
    for inner in block:
        yield inner.operation
        yield from inside(inner)


def around(block: Any) -> Iterator[Any]:
    """The operations that contain `block`, from the innermost outwards."""
    owner = block.owner
    while owner is not None:
        yield owner.operation
        owner = owner.operation.parent


def loops_around(block: Any) -> list[Any]:
    """The loops that contain `block`, from the innermost outwards."""
    return [op for op in around(block) if op.name in LOOPS]


def block_of(value: Any) -> Any:
    """The block that defines `value`, as an argument or as the result of an operation."""
    return value.owner if isinstance(value.owner, ir.Block) else value.owner.operation.block


def owner_of(value: Any) -> Any:
    """The operation that defines `value`; for a block argument, the operation that contains the block."""
    return value.owner.owner.operation if isinstance(value.owner, ir.Block) else value.owner.operation


def joined(timepoints: Sequence[Any], kind: ir.Type) -> Any:
    """Create a timepoint that is reached once all `timepoints` are; immediately if there are none."""
    name = "stream.timepoint.join" if timepoints else "stream.timepoint.immediate"
    return ir.Operation.create(name, [kind], list(timepoints)).result


def outside_loops(operation: Any, values: Iterable[Any]) -> Any:
    """The outermost loop around `operation` that defines none of `values`; `operation` itself if there is none."""
    outermost = operation
    for loop in loops_around(operation.block):
        if any(loop in around(block_of(value)) for value in values):
            break
        outermost = loop
    return outermost


def executable_of(dispatch: Any) -> str:
    """The name of the executable that a dispatch with one entry point calls."""
    (entry_point,) = ir.ArrayAttr(dispatch.attributes["entry_points"])
    return str(ir.SymbolRefAttr(entry_point).value[0])
