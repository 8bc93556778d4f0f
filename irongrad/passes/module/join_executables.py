"""Join kernels into a few executables.

IREE 3.13.0 builds a new pass pipeline for each executable. Each canonicalizer of a pipeline collects the rewrite rules
of all loaded operators, including those of every GPU: the transform dialect, which is always present, loads them.
Kernels that share an executable share the pipeline. If there are few kernels, IREE links all executables into one
library.

LLVM compiles a library in one thread. So a module with more kernels becomes two libraries, one per executable, and a
module with very many kernels becomes four or more. The number depends on the kernels only, because compiled code must
not depend on the machine. docs/dev/measurements has the savings of both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.device import has_microkernels
from irongrad.mlir.walk import inside, name_of, text_of
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass

# IREE compiles executables in parallel, each in one thread.
EXECUTABLES = 8

# With microkernels, a product of another type than float32 keeps its own executable. IREE declares its product
# microkernel once per executable, with the types of the first product, and rejects the next product ("failed to lower
# micro kernel operation to function call").
_PRODUCT = re.compile(r"matmul|mmt4d|contract|encoding")
_OTHER_THAN_FLOAT32 = re.compile(r"x(?:bf16|f16|f64|i8|i16|i32|i64)\b")

# Each library costs a sixth of a second of CPU time. From this many kernels on, two libraries take a fifth less wall
# time than one.
FEWEST_OF_TWO_LIBRARIES = 40
FEWEST_OF_A_LIBRARY = 125  # if there are four libraries or more
_UNLINKED = "--iree-hal-link-executables=false"

_EXPORT = "stream.executable.export"


@dataclass(frozen=True)
class _Executable:
    """An executable with one kernel.

    Attributes:
        operation: the `stream.executable`.
        export: the `stream.executable.export` of the kernel.
        code: the inner `builtin.module` that contains the kernel only.
        function: the kernel's function.
    """

    operation: Any
    export: Any
    code: Any
    function: Any


@dataclass(frozen=True)
class JoinExecutables(ModulePass):
    """Put the kernels of a module into a few executables.

    Before:
        stream.executable @a { ... @f }; stream.executable @b { ... @g }; stream.cmd.dispatch @b::@g
    After:
        stream.executable @a { ... @f ... @g }; stream.cmd.dispatch @a::@g
    """

    name: ClassVar[str] = "join-executables"

    def applies(self, context: ModuleContext) -> bool:
        """For targets whose executables are machine code; a shader holds one kernel."""
        return context.target.joined_executables

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        single = _single_kernels(module)
        libraries = _libraries_of(len(single)) if len(single) == len(_executables(module)) else 1
        count = libraries if libraries > 1 else EXECUTABLES
        homes = {name_of(one.operation): single[i % count] for i, one in enumerate(single)}
        names = {name: name_of(home.operation) for name, home in homes.items()}
        with module.context:
            for operation in inside(module.operation):
                if "entry_points" in operation.attributes:
                    operation.attributes["entry_points"] = _renamed(operation.attributes["entry_points"], names)
        joined = single[count:]
        for one in joined:
            home = homes[name_of(one.operation)]
            one.export.move_before(home.code)
            one.function.move_before(home.function)
            one.operation.erase()
        return PassResult(bool(joined), {"joined": len(joined)})


def linking_flags(stream: ir.Module) -> tuple[str, ...]:
    """Flags that keep each executable a library of its own, if `JoinExecutables` made several libraries.

    Args:
        stream: the module after `JoinExecutables`.
    """
    found = _executables(stream)
    kernels = sum(part.name == _EXPORT for executable in found for part in _contents(executable))
    return (_UNLINKED,) if 1 < len(found) == _libraries_of(kernels) else ()


def _libraries_of(kernels: int) -> int:
    """The number of libraries for this many kernels: a power of two, like the core counts of machines."""
    if kernels < FEWEST_OF_TWO_LIBRARIES:
        return 1
    libraries = 2
    while kernels >= 2 * libraries * FEWEST_OF_A_LIBRARY:
        libraries *= 2
    return libraries


def _executables(module: ir.Module) -> list[Any]:
    return [op.operation for op in module.body.operations if op.operation.name == "stream.executable"]


def _single_kernels(module: ir.Module) -> list[_Executable]:
    """The executables that hold one kernel and may be joined; of kernels with the same name only the first."""
    microkernels = has_microkernels(module)
    found: dict[str, _Executable] = {}
    for executable in _executables(module):
        parts = _contents(executable)
        code = [part for part in parts if part.name == "builtin.module"]
        functions = [function for part in code for function in _contents(part)]
        kinds = [part.name for part in parts[:2]]
        one = kinds == [_EXPORT, "builtin.module"] and len(functions) == 1
        if one and not (microkernels and _is_product_of_other_type(functions[0])):
            found.setdefault(name_of(functions[0]), _Executable(executable, parts[0], code[0], functions[0]))
    return list(found.values())


def _is_product_of_other_type(function: Any) -> bool:
    text = text_of(function)
    return bool(_PRODUCT.search(text) and _OTHER_THAN_FLOAT32.search(text))


def _contents(operation: Any) -> list[Any]:
    """The operations in the only block of `operation`."""
    return [inner.operation for inner in operation.regions[0].blocks[0]]


def _renamed(entry_points: Any, names: dict[str, str]) -> Any:
    """`entry_points` with the executables renamed according to `names`."""
    paths = [list(ir.SymbolRefAttr(entry_point).value) for entry_point in ir.ArrayAttr(entry_points)]
    return ir.ArrayAttr.get([ir.SymbolRefAttr.get([names.get(first, first), *rest]) for first, *rest in paths])


PASS = JoinExecutables
