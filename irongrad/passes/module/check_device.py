"""What a module asks its device when it is loaded, so that no program runs code on a device that it is not made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iree.compiler import ir

from irongrad.mlir.walk import bytecode_of
from irongrad.targets import Requirement


def check_device(bytecode: bytes, requirements: Sequence[Requirement]) -> bytes:
    """Put the checks before everything else that a module does when it is loaded.

    Args:
        bytecode: the module, as MLIR bytecode, which the result is too.
        requirements: what its device must answer.
    """
    if not requirements:
        return bytecode
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(bytecode)
        checks = ir.Module.parse("\n".join(_initializer(requirements)))
        (initializer,) = checks.body.operations
        initializer.detach_from_parent()
        first = module.body.operations[0]
        module.body.append(initializer)
        initializer.move_before(first)
        return bytecode_of(module)


def _initializer(requirements: Sequence[Requirement]) -> Iterator[str]:
    yield "util.initializer {"
    yield "  %first = arith.constant 0 : index"
    yield "  %device = hal.devices.get %first : !hal.device"
    for number, need in enumerate(requirements):
        query = f'hal.device.query<%device : !hal.device> key("{need.category}" :: "{need.key}")'
        yield f"  %known{number}, %value{number} = {query} : i1, i32"
        yield f"  %need{number} = arith.constant {need.value} : i32"
        comparison = "sge" if need.at_least else "eq"
        yield f"  %right{number} = arith.cmpi {comparison}, %value{number}, %need{number} : i32"
        yield f'  cf.assert %right{number}, "this module {need.message}"'
    yield "  util.return"
    yield "}"
