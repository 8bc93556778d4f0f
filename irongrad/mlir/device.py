"""The device that a module is compiled for, as IREE records it in the module."""

from __future__ import annotations

import re
from typing import Any

from iree.compiler import ir

from irongrad.mlir.walk import GLOBAL, name_of, text_of

NO_MICROKERNELS = ', ukernels = "none"'


_DEVICE = "__device_0"  # the global in which IREE records the device


def device_of(module: ir.Module) -> Any | None:
    """The global that records the device; None if the module has none.

    Args:
        module: IREE's output of the phase `flow`, or of a later one.
    """
    kept = (op.operation for op in module.body.operations if op.operation.name == GLOBAL)
    return next((op for op in kept if name_of(op) == _DEVICE), None)


def cpu_of(module: ir.Module) -> tuple[str, tuple[str, ...]]:
    """The architecture and CPU features of a module's device.

    The flags do not tell them: the flag value `host` means nothing on another machine.

    Args:
        module: as for `device_of`.

    Returns:
        The architecture as LLVM names it, and the features; both empty if the device is no CPU.
    """
    device = device_of(module)
    text = text_of(device) if device else ""
    triple = re.search(r'target_triple = "([^-"]+)-', text)
    features = re.search(r'cpu_features = "([^"]*)"', text)
    names = features.group(1).split(",") if features else []
    architecture = triple.group(1).replace("arm64", "aarch64") if triple else ""  # Apple's triples say arm64
    return architecture, tuple(dict.fromkeys(n[1:] for n in names if n.startswith("+")))


def has_microkernels(module: ir.Module) -> bool:
    """Whether IREE may compile products of `module`, the output of one of its phases, to microkernels."""
    device = device_of(module)
    return device is None or NO_MICROKERNELS not in text_of(device)
