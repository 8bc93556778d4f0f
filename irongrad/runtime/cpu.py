"""Check that this machine's CPU has the features that a compiled file needs."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection
from pathlib import Path

from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import TargetSpec

# Decisive features whose name in Linux's /proc/cpuinfo differs from LLVM's, on x86 and on Arm
# (Documentation/arch/arm64/elf_hwcaps.rst of Linux). All other names differ at most in dashes, dots and underscores.
_LINUX_NAMES = {
    "sse3": "pni",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "dotprod": "asimddp",
    "fullfp16": "asimdhp",
    "fp16fml": "asimdfhm",
    "lse": "atomics",
}

# The features that generated arithmetic uses: prefixes of their names, on riscv64 whole names. LLVM never emits the
# others (clzero, wbnoinvd, …) for arithmetic, so they are not checked.
_DECISIVE = {
    "x86_64": (
        "sse",
        "ssse",
        "avx",
        "fma",
        "f16c",
        "bmi",
        "lzcnt",
        "popcnt",
        "movbe",
        "amx",
        "vaes",
        "gfni",
        "vpclmul",
    ),
    "aarch64": ("dotprod", "fullfp16", "fp16fml", "lse", "bf16", "i8mm", "sve", "sme"),
    "riscv64": ("v", "zfh", "zvfh"),
}

# A version name for instructions that the same CPUs also list one by one: all of AVX-512 as of Granite Rapids (Intel
# AVX10.1 specification, 356368). Linux has no name for it, so it is not checked.
_COLLECTIVE = ("avx10.1",)

# The `--target` that runs on every CPU of an architecture.
_OLDER = {"x86_64": "llvm-cpu:cpu=x86-64-v2", "aarch64": "llvm-cpu:arch=aarch64", "riscv64": "llvm-cpu:arch=riscv64"}


# Features with which a CPU of an architecture multiplies bfloat16 faster than float32.
_OF_BFLOAT16 = {"x86_64": {"amx-bf16", "avx512bf16"}, "aarch64": {"bf16"}}


def multiplies_bfloat16(architecture: str, features: Collection[str]) -> bool:
    """Whether a CPU has instructions for products of bfloat16; features have LLVM's names or Linux's."""
    return not set(map(_letters, _OF_BFLOAT16.get(architecture, ()))).isdisjoint(map(_letters, features))


def has_tile_registers(features: Collection[str]) -> bool:
    """Whether an x86-64 CPU multiplies bfloat16 in the tile registers of AMX; names as for `multiplies_bfloat16`."""
    return "amxbf16" in map(_letters, features)


def check_cpu(target: TargetSpec, directory: Path) -> None:
    """Refuse a compiled file that would stop with an illegal instruction on this machine.

    Raises:
        ArtifactError: the architecture differs, or features are missing; names them.
    """
    if not target.architecture:
        return
    here = architecture()
    if here != target.architecture:
        raise ArtifactError(
            f"{directory / target.file} is compiled for {target.architecture}, this machine is {here}. Compile it for "
            "this machine"
        )
    features = cpu_features()
    if features is None:
        return
    available = set(map(_letters, features))
    decisive = _DECISIVE.get(here, ())
    listed = [f for f in target.features if not f.startswith(_COLLECTIVE)]
    needed = [f for f in listed if (f in decisive if here == "riscv64" else f.startswith(decisive))]
    missing = [f for f in needed if _letters(_LINUX_NAMES.get(f, f)) not in available]
    if missing:
        raise ArtifactError(
            f"{directory / target.file} needs CPU features that this machine lacks: {', '.join(missing)}. Compile it "
            f"here, or for an older CPU with --target {_OLDER.get(here, 'llvm-cpu:cpu=generic')}"
        )


def _letters(feature: str) -> str:
    """Drop the separators from a feature name: LLVM has sse4.1 and avx512vnni, Linux sse4_1 and avx512_vnni."""
    return re.sub(r"[-._]", "", feature)


def architecture() -> str:
    """Return this machine's CPU architecture by LLVM's name."""
    return platform.machine().replace("AMD64", "x86_64").replace("arm64", "aarch64")


def cpu_name() -> str:
    """Return the CPU's model name, or its architecture if the CPU reports no name."""
    return _cpuinfo("model name") or architecture()


def cpu_features() -> set[str] | None:
    """Return the CPU's features by Linux's names, or None if they cannot be read."""
    line = _cpuinfo("flags") or _cpuinfo("Features")
    if isa := _cpuinfo("isa"):  # RISC-V: rv64imafdcv_zfh_…
        letters, *names = isa.split("_")
        return {*letters.removeprefix("rv64"), *names}
    return set(line.split()) if line else None


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    line = next((x for x in text.splitlines() if x.startswith(key)), "")
    return line.partition(":")[2].strip()
