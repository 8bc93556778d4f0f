"""Load each tensor of the base by an operation of its own, so that the runtime can use it where it lies in the file.

IREE copies parameters that it loads together to one buffer. A parameter that is loaded alone, and that nothing stores,
may stay where it is: in a mapped file, whose memory all processes share
(compiler/src/iree/compiler/Dialect/Stream/Transforms/PackConstants.cpp and iree_io_parameter_index_provider_load in
runtime/src/iree/io/parameter_index_provider.c of IREE 3.13.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.walk import inside, joined
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass
from irongrad.runtime.manifest import BASE_SCOPE

_CONSTANTS = "stream.resource.constants"
_OF_BASE = f'#stream.parameter.named<"{BASE_SCOPE}"'


@dataclass(frozen=True)
class MapBase(ModulePass):
    """Split the operations that load tensors of the base beside others.

    Before:
        %a, %b, %ready = stream.resource.constants :
            #stream.parameter.named<"base"::"a">, #stream.parameter.named<"base"::"b">
    After:
        %a, %ready_a = stream.resource.constants : #stream.parameter.named<"base"::"a">
        %b, %ready_b = stream.resource.constants : #stream.parameter.named<"base"::"b">
        %ready = stream.timepoint.join max(%ready_a, %ready_b)
    """

    name: ClassVar[str] = "map-base"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        initializers = [op.operation for op in module.body.operations if op.operation.name == "util.initializer"]
        found = [op for outer in initializers for op in inside(outer) if op.name == _CONSTANTS]
        groups = {operation: _groups(operation) for operation in found}
        several = {operation: parts for operation, parts in groups.items() if len(parts) > 1}
        for operation, parts in several.items():
            _split(operation, parts)
        return PassResult(bool(several), {"loads": sum(map(len, several.values()))})


def _groups(constants: Any) -> list[list[int]]:
    """The indices of the values to load together: each tensor of the base is alone."""
    values = [str(value) for value in ir.ArrayAttr(constants.attributes["values"])]
    base = [i for i, value in enumerate(values) if value.startswith(_OF_BASE)]
    others = [i for i in range(len(values)) if i not in base]
    return [[i] for i in base] + ([others] if others else [])


def _split(constants: Any, groups: list[list[int]]) -> None:
    values = ir.ArrayAttr(constants.attributes["values"])
    kept = {n: constants.attributes[n] for n in constants.attributes if n != "values"}
    *results, ready = constants.results
    made = []
    with constants.location, ir.InsertionPoint(constants):
        for group in groups:
            part = ir.Operation.create(
                _CONSTANTS,
                [*(results[i].type for i in group), ready.type],
                [constants.operands[i] for i in group],
                kept | {"values": ir.ArrayAttr.get([values[i] for i in group])},
            )
            made.append(part)
            for index, result in zip(group, part.results, strict=False):
                results[index].replace_all_uses_with(result)
        ready.replace_all_uses_with(joined([part.results[len(part.results) - 1] for part in made], ready.type))
    constants.erase()


PASS = MapBase
