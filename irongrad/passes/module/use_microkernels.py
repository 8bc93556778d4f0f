"""Use IREE's microkernels for matrix products only if they make the products faster.

IREE 3.13.0 links its whole library of microkernels, for all element types, into each library of machine code that has a
product. LLVM optimises all of it before unused functions are dropped, which takes 0.2 s of CPU time. A CPU without a
microkernel gets a loop in C that adds one product after the other. For float32, the code that IREE generates is as fast
as a microkernel. For bfloat16, only the microkernel uses the special instructions
(docs/dev/measurements/2026-11-24-zen-4.md). So modules are compiled without microkernels, unless their products gain
by them.
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

# By element type: CPU features, with any of which microkernels are faster.
_FASTER = {"bf16": {"avx512bf16", "bf16"}, "i8": {"avx2"}}

# The element type of a product, in the encoding of an operand's type.
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
    """The types of the operands and results of kernels; they tell how an operand of a product is packed."""
    kernels = found_in(module, *KERNELS)
    return set(map(str, {value.type for op in kernels for value in (*op.operands, *op.results)}))


PASS = UseMicrokernels
