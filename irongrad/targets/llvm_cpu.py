"""llvm-cpu: machine code in an embedded ELF, run by IREE's local-task or local-sync device."""

from __future__ import annotations

from irongrad.targets.base import Target, take_option


def target(options: dict[str, str]) -> Target:
    """The target with options `cpu` (an LLVM CPU name, `host` by default) and `features` (`+avx2,-fma`)."""
    take_option(options, "llvm-cpu", ("cpu",))
    cpu = options.get("cpu", "host")
    return Target(
        name="llvm-cpu",
        device="local-task",
        flags=(
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            f"--iree-llvmcpu-target-cpu={cpu}",
            "--iree-opt-data-tiling",
        ),
        host=True,
    )
