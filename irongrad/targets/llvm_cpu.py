"""llvm-cpu: machine code in an embedded ELF, run by IREE's local-task or local-sync device."""

from __future__ import annotations

from irongrad.targets.base import Target, take_option

# IREE 3.13.0 refuses some matmuls of ordinary linear layers (2048 x 2048, batch 32) because its own tile sizes ask
# for 33 KiB of stack, over its default limit of 32 KiB. Threads have 512 KiB at the least.
# tests/targets/test_llvm_cpu.py tells when this is no longer needed.
_STACK_BYTES = 128 * 1024


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
            f"--iree-llvmcpu-stack-allocation-limit={_STACK_BYTES}",
        ),
        host=True,
    )
