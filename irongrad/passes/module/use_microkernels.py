"""IREE's microkernels for products of matrices: where they are worth it, and nowhere else.

IREE 3.13.0 links its whole library of microkernels, for all types of numbers, into each library of machine code that
has a product, and LLVM optimises all of it before what nothing calls is dropped: 0.2 s of CPU time. A CPU for which it
has none gets a loop in C, which adds up one product after the other. What IREE generates itself for float32 is as fast
as the microkernel where there is one; for bfloat16 there are instructions that only the microkernel uses
(docs/benchmarks.md). So a module is compiled without, and those whose products gain by them get them back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.mlir.device import NO_MICROKERNELS, cpu_of, device_of
from irongrad.mlir.walk import KERNELS, found_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

# The features of a CPU with either of which microkernels are faster, by the type of what is multiplied.
_FASTER = {"bf16": {"avx512bf16", "bf16"}, "i8": {"avx2"}}

# How IREE says, in the type of an operand, what a product multiplies.
_MULTIPLIED = re.compile(r"element_types = \[(\w+),")


@dataclass(frozen=True)
class UseMicrokernels(ModulePass):
    """Compile products with IREE's microkernels if that makes them faster on the module's CPU.

    Before:
        util.global @__device_0 = #hal.device.target<..., ukernels = "none", ...>   // with products of bfloat16
    After:
        util.global @__device_0 = #hal.device.target<..., ...>

    All products of a module get them or none. A module is compiled without them up to here.
    """

    name: ClassVar[str] = "use-microkernels"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        multiplied = {name for text in _types_of_kernels(module) for name in _MULTIPLIED.findall(text)}
        device, (_, features) = device_of(module), cpu_of(module)
        if device is None or not any(_FASTER.get(name, set()) & set(features) for name in multiplied):
            return PassResult(False)
        value = str(device.attributes["initial_value"])
        device.attributes["initial_value"] = ir.Attribute.parse(value.replace(NO_MICROKERNELS, ""))
        return PassResult(True, {"enabled": 1})


def _types_of_kernels(module: ir.Module) -> set[str]:
    """The types of what kernels take and give, which say how an operand of a product is packed."""
    kernels = found_in(module, *KERNELS)
    return set(map(str, {value.type for op in kernels for value in (*op.operands, *op.results)}))


PASS = UseMicrokernels
