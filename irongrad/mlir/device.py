"""What a module of IREE's says of the device that it is compiled for."""

from __future__ import annotations

import re
from typing import Any

from iree.compiler import ir

from irongrad.mlir.walk import name_of, text_of

NO_MICROKERNELS = ', ukernels = "none"'


_DEVICE = "__device_0"  # the global in which IREE keeps it


def device_of(module: ir.Module) -> Any | None:
    """The global that holds the device; None where a module has none.

    Args:
        module: as it is after IREE's phase `flow`, or a later one.
    """
    kept = (op.operation for op in module.body.operations if op.operation.name == "util.global")
    return next((op for op in kept if name_of(op) == _DEVICE), None)


def cpu_of(module: ir.Module) -> tuple[str, tuple[str, ...]]:
    """The architecture and CPU features of a module's device: `host` in a flag says nothing to another machine.

    Args:
        module: as above.

    Returns:
        The architecture as LLVM names it, and the features; both empty where the device is no CPU.
    """
    device = device_of(module)
    text = text_of(device) if device else ""
    triple = re.search(r'target_triple = "([^-"]+)-', text)
    features = re.search(r'cpu_features = "([^"]*)"', text)
    names = features.group(1).split(",") if features else []
    architecture = triple.group(1).replace("arm64", "aarch64") if triple else ""  # as Apple's triples have it
    return architecture, tuple(dict.fromkeys(n[1:] for n in names if n.startswith("+")))


def has_microkernels(module: ir.Module) -> bool:
    """Whether products of `module`, which is as a phase of IREE's leaves it, may be microkernels."""
    device = device_of(module)
    return device is None or NO_MICROKERNELS not in text_of(device)
