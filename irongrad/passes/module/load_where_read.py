"""Load initial values where they are read, so that no global holds them for as long as the module is loaded.

IREE 3.13.0 makes a global of each parameter that a function or an initializer reads
(compiler/src/iree/compiler/Dialect/Flow/Transforms/OutlineConstants.cpp). `reset` reads all of the state, and so the
module holds a second copy of it. That of Adam's zeros has no file behind it that is as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import GLOBAL, LOAD, global_of, name_of, named_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass
from irongrad.runtime.manifest import SCOPE

_CONSTANT = "flow.tensor.constant"
_VALUE, _MUTABLE = "initial_value", "is_mutable"
_OF_STATE = f'#flow.parameter.named<"{SCOPE}"'


@dataclass(frozen=True)
class LoadWhereRead(ModulePass):
    """Replace loads of globals that hold an initial value by loads of the parameter.

    Before:
        util.global private @__parameter_w = #flow.parameter.named<"state"::"w">
        %w = util.global.load immutable @__parameter_w
    After:
        %w = flow.tensor.constant #flow.parameter.named<"state"::"w">
    """

    name: ClassVar[str] = "load-where-read"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        globals_ = [op.operation for op in module.body.operations if op.operation.name == GLOBAL]
        held = {name_of(operation): operation for operation in globals_ if _holds_initial_value(operation)}
        for load in [op for op in named_in(module, LOAD) if global_of(op) in held]:
            _load_parameter(load, held[global_of(load)].attributes[_VALUE])
        for operation in held.values():
            operation.erase()
        return PassResult(bool(held), {"globals": len(held)})


def _holds_initial_value(operation: Any) -> bool:
    attributes = operation.attributes
    return _MUTABLE not in attributes and _VALUE in attributes and str(attributes[_VALUE]).startswith(_OF_STATE)


def _load_parameter(load: Any, parameter: ir.Attribute) -> None:
    with load.location, ir.InsertionPoint(load):
        constant = ir.Operation.create(_CONSTANT, [load.results[0].type], [], {"value": parameter})
    load.results[0].replace_all_uses_with(constant.results[0])
    load.erase()


PASS = LoadWhereRead
