"""The portable module -> the module that one target compiles."""

from __future__ import annotations

from irongrad.pipeline.device_checks import check_device
from irongrad.pipeline.host_scalars import scalars_on_host
from irongrad.targets import Target


def retarget(bytecode: bytes, target: Target) -> bytes:
    """Change what the device of `target` cannot do, and have the module check the device.

    Args:
        bytecode: the portable module, as MLIR bytecode, which the result is too.
        target: what it is for.
    """
    if target.scalars_on_host:
        bytecode = scalars_on_host(bytecode)
    return check_device(bytecode, target.requirements)
