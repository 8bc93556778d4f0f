"""Whether this machine's CPU has what a compiled file needs."""

from __future__ import annotations

import platform
from pathlib import Path

from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import TargetSpec

# LLVM's feature names where Linux's /proc/cpuinfo spells them differently.
_LINUX_NAMES = {
    "sse3": "pni",
    "bmi": "bmi1",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "cx16": "cx16",
    "sahf": "lahf_lm",
    "lzcnt": "abm",
    "sha": "sha_ni",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
}

# Only these decide whether generated arithmetic runs; the rest (clzero, wbnoinvd, …) is never emitted for it.
_DECISIVE = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "lzcnt", "popcnt", "movbe", "amx", "vaes", "gfni", "vpclmul")


def check_cpu(target: TargetSpec, directory: Path) -> None:
    """Refuse a compiled file that would end in an illegal instruction here.

    Raises:
        ArtifactError: the architecture differs, or features are missing, named.
    """
    if not target.architecture:
        return
    here = platform.machine().replace("AMD64", "x86_64").replace("arm64", "aarch64")
    if here != target.architecture:
        raise ArtifactError(
            f"{directory / target.file} is compiled for {target.architecture}, this machine is {here}. Compile it for "
            "this machine"
        )
    available = _features()
    if available is None:
        return
    needed = [f for f in target.features if f.startswith(_DECISIVE)]
    missing = [f for f in needed if _LINUX_NAMES.get(f, f).replace("-", "_") not in available]
    if missing:
        raise ArtifactError(
            f"{directory / target.file} needs CPU features that this machine lacks: {', '.join(missing)}. Compile it "
            "here, or for an older CPU with --target llvm-cpu:cpu=x86-64-v2"
        )


def _features() -> set[str] | None:
    """The CPU's flags as Linux names them, or None where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    line = next((x for x in text.splitlines() if x.startswith("flags")), None)
    return set(line.partition(":")[2].split()) if line else None
