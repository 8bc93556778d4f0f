"""llvm-cpu: machine code in an embedded ELF, run by IREE's local-task or local-sync device."""

from __future__ import annotations

from irongrad.targets.base import Target, take_option

# By default IREE 3.13.0 refuses a dispatch for which its own tile sizes ask for more than 32 KiB of stack (33 KiB for
# what tests/pipeline/test_toolchain.py compiles). Every thread has 512 KiB at the least.
_STACK_BYTES = 128 * 1024

# IREE 3.13.0 refuses code of its own for a product of matrices of which two elementwise functions are results, for
# holding 32 KiB in one vector (what tests/pipeline/test_toolchain.py compiles). LLVM splits it, and the code is fast.
LARGE_VECTORS = "--iree-llvmcpu-fail-on-large-vector=false"


def target(options: dict[str, str]) -> Target:
    """The target with the option `cpu`: an LLVM CPU name such as `x86-64-v3`, or `host`, the default."""
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
            LARGE_VECTORS,
        ),
        host=True,
    )
