"""Make a module query its device at load time, and refuse a device that it is not compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from iree.compiler import ir

from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass
from irongrad.targets import Requirement


@dataclass(frozen=True)
class CheckDevice(ModulePass):
    """Have a module refuse to load on a device that it is not compiled for.

    Before:
        module { util.global ... }
    After:
        module { util.initializer { %v = hal.device.query<...>; cf.assert %right, "this module ..." } util.global ... }

    Attributes:
        requirements: the queries to the device, with the answers that it must give.
    """

    name: ClassVar[str] = "check-device"
    required: ClassVar[str] = "the module would compute wrong numbers on another device"

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def of_context(cls, context: ModuleContext) -> Self:
        """The pass with the requirements of the target."""
        return cls(context.target.requirements)

    def applies(self, context: ModuleContext) -> bool:
        """For targets with requirements."""
        return bool(self.requirements)

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        checks = ir.Module.parse("\n".join(_initializer(self.requirements)))
        (initializer,) = checks.body.operations
        initializer.detach_from_parent()
        first = module.body.operations[0]
        module.body.append(initializer)
        initializer.move_before(first)
        return PassResult(True, {"checks": len(self.requirements)})


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


PASS = CheckDevice
