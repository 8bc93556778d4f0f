"""llvm-cpu: machine code in an embedded ELF, run by IREE's local-task or local-sync device.

IREE itself loads the ELF, and the code calls nothing of the operating system. So one file runs on Linux, Windows and
macOS: only the architecture and the CPU's features matter.
"""

from __future__ import annotations

from irongrad.runtime.cpu import architecture, cpu_features, has_tile_registers, multiplies_bfloat16
from irongrad.targets.base import DATA_TILING, Ability, Kind, Option, Quirk, Target

# By default IREE 3.13.0 refuses a dispatch if its own tile sizes need more than 32 KiB of stack (33 KiB for the module
# in tests/pipeline/iree/test_toolchain.py). Threads have more: irongrad/runtime/stacks.py.
_STACK = "--iree-llvmcpu-stack-allocation-limit="
STACK = f"{_STACK}{128 * 1024}"

# A module that is refused even so is compiled again with this limit.
LARGEST_STACK = f"{_STACK}{256 * 1024}"

# IREE 3.13.0 refuses its own code for a matrix product with two elementwise results, because the code holds 32 KiB in
# one vector (the module in tests/pipeline/iree/test_toolchain.py). LLVM splits the vector, and the code is fast.
LARGE_VECTORS = "--iree-llvmcpu-fail-on-large-vector=false"

# In IREE 3.13.0 microkernels cost compile time and are slow on many CPUs. `with_microkernels` brings back those that
# are fast.
_WITHOUT_MICROKERNELS = "--iree-llvmcpu-enable-ukernels=none"

# The largest freed block that IREE 3.13.0 keeps for the next call.
_LARGEST_FREED = 64 * 1024 * 1024

# By architecture: the triple, the CPU, and features that every such machine has (the Armv8.0 baseline, RISC-V's RVA20
# profile).
_ARCHITECTURES = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64", ""),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic", ""),
    "riscv64": ("riscv64-unknown-linux-gnu", "generic-rv64", "+m,+a,+f,+d,+c"),
}


# LLVM's names of CPUs with AMX.
_WITH_TILES = frozenset({"sapphirerapids", "emeraldrapids", "graniterapids", "graniterapids-d", "diamondrapids"})

# Those with AMX or AVX512-BF16, except Cooper Lake, whose VDPBF16PS is no faster than float32.
_WITH_HALVES = _WITH_TILES | {"znver4", "znver5"}

# Those that have the vectors of our kernels.
_WITH_FMA = _WITH_HALVES | {
    *("x86-64-v3", "x86-64-v4", "haswell", "broadwell", "skylake", "skylake-avx512", "cascadelake", "cooperlake"),
    *("icelake-client", "icelake-server", "tigerlake", "alderlake", "raptorlake", "znver1", "znver2", "znver3"),
}


def _make_target(name: str, options: dict[str, str]) -> Target:
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
        # Debug symbols take a tenth of the compile time and a fifth of the file. Profiles name the dispatches without
        # them too.
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
        abilities=_abilities(triple, cpu, features),
    )


def _abilities(triple: str, cpu: str, features: str) -> frozenset[Ability]:
    """What a CPU of x86-64 does fast, as far as its name and options tell."""
    if triple and not triple.startswith("x86_64"):
        return frozenset()
    added = [feature.removeprefix("+") for feature in features.split(",") if feature.startswith("+")]
    if cpu == "host" and architecture() == "x86_64":
        added += cpu_features() or ()
    has_kernels = cpu in _WITH_FMA or not {"fma", "avx512f"}.isdisjoint(added)
    found = {
        Ability.TILES: cpu in _WITH_TILES or has_tile_registers(added),
        Ability.HALVES: cpu in _WITH_HALVES or multiplies_bfloat16("x86_64", added),
        Ability.CONVOLUTIONS: has_kernels,
        Ability.ATTENTION: has_kernels,
        Ability.LOOPS: has_kernels,
    }
    return frozenset(ability for ability, is_there in found.items() if is_there)


KIND = Kind(
    name="llvm-cpu",
    summary="machine code for a CPU; one file for Linux, Windows and macOS",
    options=(
        Option("cpu", "LLVM's name of a CPU, such as x86-64-v3, cortex-a76 or apple-m1; this machine's by default"),
        Option("arch", "another architecture than this machine's", tuple(_ARCHITECTURES)),
        Option("triple", "LLVM's target triple, for what arch does not name"),
        Option("features", "LLVM's CPU features, such as +v or +dotprod+fullfp16"),
    ),
    make=_make_target,
    quirks=(
        Quirk(
            "IREE 3.13.0",
            "a dispatch is refused because its own tile sizes take too much stack",
            f"{STACK}; if that is too little, the module is compiled again with {LARGEST_STACK}",
            "tests/pipeline/iree/test_toolchain.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "a matrix product with two elementwise results is refused because of one large vector",
            LARGE_VECTORS,
            "tests/pipeline/iree/test_toolchain.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "if one microkernel may be called, all are compiled; on a CPU without one for a product, a slow one runs",
            f"{_WITHOUT_MICROKERNELS}, except for products that are faster with microkernels",
            "tests/passes/module/test_use_microkernels.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "blocks over 64 MiB are allocated and cleared again in every call",
            "larger blocks for intermediate values are allocated once, when the module is loaded",
            "tests/passes/module/test_keep_buffers.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "every call writes new state to memory of its own, which takes twice the size if memory is kept",
            "elementwise updates overwrite the old state",
            "tests/passes/module/test_state_in_place.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "booleans that are packed as operands of a product have other values when they are read",
            f"the module is compiled again without {DATA_TILING}",
            "tests/pipeline/iree/test_toolchain.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "a kernel that computes rows of several batches as one dimension may pack them wrongly for a product",
            "another kernel packs them",
            "tests/passes/module/test_keep_packing_apart.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "a crash on a transposed matrix product with data tiling",
            f"the module is compiled again without {DATA_TILING}",
            "tests/pipeline/iree/test_toolchain.py",
        ),
    ),
)
