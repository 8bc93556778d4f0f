"""The portable module -> the module that one target compiles."""

from __future__ import annotations

from collections.abc import Sequence

from irongrad.passes.module.check_device import check_device
from irongrad.passes.module.narrow_integers import narrow_integers
from irongrad.passes.module.scalars_on_host import scalars_on_host
from irongrad.pipeline.iree.portable_module import PortableModule
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.runtime.manifest import EntryPoint
from irongrad.targets import Target


def retarget(module: PortableModule, target: Target) -> bytes:
    """Change what the device of `target` cannot do, and have the module check the device.

    Returns:
        The module, as MLIR bytecode.

    Raises:
        UnsupportedOpError: it needs 64-bit integers that the target lacks.
    """
    bytecode = module.bytecode
    if target.scalars_on_host:
        bytecode = scalars_on_host(bytecode)
    if not target.integers64:
        _check_inputs(module.entry_points, target)
        bytecode = narrow_integers(bytecode)
    return check_device(bytecode, target.requirements)


def _check_inputs(entry_points: Sequence[EntryPoint], target: Target) -> None:
    """Refuse 64-bit inputs that may hold any number; those with a range are checked by the module."""
    for entry in entry_points:
        if entry.name in ("import_state", "import_gradients"):
            continue  # counters
        for spec in entry.inputs:
            if spec.dtype == "int64" and spec.minimum is None:
                raise UnsupportedOpError(
                    f"the input {spec.name!r} holds 64-bit integers that are more than indices, and the devices of the "
                    f"target {target.name!r} have none. Make it int32, or compile for vulkan:profile=desktop"
                )
