"""llvm-cpu: machine code in an embedded ELF, run by IREE's local-task or local-sync device.

The ELF is loaded by IREE itself and calls nothing of the operating system, so one file runs on Linux, Windows and
macOS: only the architecture and the CPU's features matter.
"""

from __future__ import annotations

from irongrad.targets.base import DATA_TILING, Kind, Option, Quirk, Target

# By default IREE 3.13.0 refuses a dispatch for which its own tile sizes ask for more than 32 KiB of stack (33 KiB for
# what tests/pipeline/iree/test_toolchain.py compiles). Threads have more: irongrad/runtime/stacks.py.
_STACK = "--iree-llvmcpu-stack-allocation-limit="
STACK = f"{_STACK}{128 * 1024}"

# What is refused even so is compiled again with this.
LARGEST_STACK = f"{_STACK}{256 * 1024}"

# IREE 3.13.0 refuses code of its own for a product of matrices of which two elementwise functions are results, for
# holding 32 KiB in one vector (what tests/pipeline/iree/test_toolchain.py compiles). LLVM splits it, and the code is
# fast.
LARGE_VECTORS = "--iree-llvmcpu-fail-on-large-vector=false"

# In IREE 3.13.0 they cost compile time and are slow on many CPUs; `with_microkernels` puts back those that are not.
_WITHOUT_MICROKERNELS = "--iree-llvmcpu-enable-ukernels=none"

# What IREE 3.13.0 keeps of what a call frees.
_LARGEST_FREED = 64 * 1024 * 1024

# The triple, and what each of its machines has, by architecture: the Armv8.0 baseline, and RISC-V's RVA20 profile.
_ARCHITECTURES = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64", ""),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic", ""),
    "riscv64": ("riscv64-unknown-linux-gnu", "generic-rv64", "+m,+a,+f,+d,+c"),
}


def _make(name: str, options: dict[str, str]) -> Target:
    triple, cpu, features = "", "host", ""
    if "arch" in options:
        triple, cpu, features = _ARCHITECTURES[options["arch"]]
    triple, cpu = options.get("triple", triple), options.get("cpu", "generic" if "triple" in options else cpu)
    features = options.get("features", features.replace(",", "")).replace("+", ",+").strip(",")
    flags = [
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        f"--iree-llvmcpu-target-cpu={cpu}",
        DATA_TILING,
        STACK,
        LARGE_VECTORS,
        _WITHOUT_MICROKERNELS,
        # A tenth of the compile time and a fifth of the file; profiles name the dispatches without them too.
        "--iree-llvmcpu-debug-symbols=false",
    ]
    if triple:
        flags.append(f"--iree-llvmcpu-target-triple={triple}")
    if features:
        flags.append(f"--iree-llvmcpu-target-cpu-features={features}")
    if triple.startswith("riscv64"):
        flags.append("--iree-llvmcpu-target-abi=lp64d")
    return Target(
        name=name,
        backend="llvm-cpu",
        device="local-task",
        serial_device="local-sync",
        flags=tuple(flags),
        shared_kernels=True,
        joined_executables=True,
        state_in_place=True,
        alignment=64,  # a cache line
        largest_freed=_LARGEST_FREED,
    )


KIND = Kind(
    name="llvm-cpu",
    summary="machine code for a CPU; one file for Linux, Windows and macOS",
    options=(
        Option("cpu", "LLVM's name of a CPU, such as x86-64-v3, cortex-a76 or apple-m1; this machine's by default"),
        Option("arch", "another architecture than this machine's", tuple(_ARCHITECTURES)),
        Option("triple", "LLVM's target triple, for what arch does not name"),
        Option("features", "LLVM's CPU features, such as +v or +dotprod+fullfp16"),
    ),
    make=_make,
    quirks=(
        Quirk(
            "IREE 3.13.0",
            "a dispatch is refused for the stack that its own tile sizes take",
            f"{STACK}; where that is too little, compiled again with {LARGEST_STACK}",
            "tests/pipeline/iree/test_toolchain.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "a product of matrices with two elementwise results is refused for one large vector",
            LARGE_VECTORS,
            "tests/pipeline/iree/test_toolchain.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "all microkernels are compiled where one may be called, and CPUs without one for a product get a slow one",
            f"{_WITHOUT_MICROKERNELS}, but for products that are faster with them",
            "tests/passes/module/test_use_microkernels.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "memory over 64 MiB is allocated anew and cleared in every call",
            "intermediate values that take more have theirs from when the module is loaded",
            "tests/passes/module/test_keep_buffers.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "new state has memory of its own in every call, twice where memory is kept",
            "what updates state element by element writes it where the old one lies",
            "tests/passes/module/test_state_in_place.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "booleans that are packed as the operands of a product are others when read",
            f"compiled again without {DATA_TILING}",
            "tests/pipeline/iree/test_toolchain.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "a crash on a transposed product of matrices with data tiling",
            f"compiled again without {DATA_TILING}",
            "tests/pipeline/iree/test_toolchain.py",
        ),
    ),
)
