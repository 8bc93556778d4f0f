"""IREE's microkernels for products of matrices: where they are worth it, and nowhere else.

IREE 3.13.0 links its whole library of microkernels, for all types of numbers, into each library of machine code that
has a product, and LLVM optimises all of it before what nothing calls is dropped: 0.2 s of CPU time. A CPU for which it
has none gets a loop in C, which adds up one product after the other. What IREE generates itself for float32 is as fast
as the microkernel where there is one; for bfloat16 there are instructions that only the microkernel uses
(docs/benchmarks.md). So a module is compiled without, and those whose products gain by them get them back.
"""

from __future__ import annotations

import re

from iree.compiler import ir

from irongrad.mlir.device import NO_MICROKERNELS, cpu_of, device_of
from irongrad.mlir.walk import bytecode_of, parsed

# The features of a CPU with either of which microkernels are faster, by the type of what is multiplied.
_FASTER = {"bf16": {"avx512bf16", "bf16"}, "i8": {"avx2"}}

# How IREE says, in the type of an operand, what a product multiplies.
_MULTIPLIED = re.compile(rb"element_types = \[(\w+),")


def with_microkernels(flow: bytes) -> bytes:
    """A module that was compiled without microkernels, with them where they make its products faster.

    Args:
        flow: the module as it is after IREE's phase `flow`, as MLIR bytecode, which the result is too.
    """
    wanted = [_FASTER[name] for found in set(_MULTIPLIED.findall(flow)) if (name := found.decode()) in _FASTER]
    if not wanted:
        return flow
    with parsed(flow) as module:
        device = device_of(module)
        _, features = cpu_of(module)
        if device is None or not any(names & set(features) for names in wanted):
            return flow
        value = str(device.attributes["initial_value"])
        device.attributes["initial_value"] = ir.Attribute.parse(value.replace(NO_MICROKERNELS, ""))
        return bytecode_of(module)
