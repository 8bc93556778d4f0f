"""cuda: PTX for NVIDIA GPUs, which the driver compiles to machine code when the module is loaded."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from irongrad.targets.base import Kind, Option, Quirk, Target

_MMA_SYNC = ("NV_MMA_SYNC_F32_16x8x16_F16", "NV_MMA_SYNC_F16_16x8x16_F16", "NV_MMA_SYNC_F32_16x8x16_BF16")


@dataclass(frozen=True)
class Architecture:
    """The properties of GPUs of one compute capability.

    Attributes:
        ptx: the version of PTX, as an LLVM feature.
        shared: the bytes of shared memory that a block may ask for.
        dot: whether there are dot products of four bytes (`dp4a`).
        products: the matrix instructions that IREE generates.
    """

    ptx: str
    shared: int
    dot: bool = True
    products: tuple[str, ...] = _MMA_SYNC


# Sources: "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide, and PTX's `mma.sync`,
# whose shape m16n8k16 begins with sm_80. All other values are those of IREE 3.13.0
# (compiler/src/iree/compiler/Codegen/Dialect/GPU/TargetUtils/KnownTargets.cpp).
ARCHITECTURES = {
    "sm_70": Architecture("+ptx76", 96 * 1024, dot=False, products=()),
    "sm_75": Architecture("+ptx76", 64 * 1024, products=()),
    "sm_80": Architecture("+ptx76", 163 * 1024),
    "sm_86": Architecture("+ptx76", 99 * 1024),
    "sm_89": Architecture("+ptx84", 99 * 1024),
    "sm_90": Architecture("+ptx84", 227 * 1024),
}


def _make_target(name: str, options: dict[str, str]) -> Target:
    described = _attribute(options.get("arch", "sm_80"))
    return Target(name=name, backend="cuda", device="cuda", flags=(f"--iree-hal-target-device={described}",))


def _attribute(name: str) -> str:
    architecture = ARCHITECTURES[name]
    products = f"mma = [{', '.join(f'<{p}>' for p in architecture.products)}], " if architecture.products else ""
    return (
        '#hal.device.target<"cuda", [#hal.executable.target<"cuda", "cuda-nvptx-fb", {iree_codegen.target_info = '
        f'#iree_gpu.target<arch = "{name}", features = "{architecture.ptx}", '
        "wgp = <compute = fp64|fp32|fp16|int64|int32|int16|int8, storage = b64|b32|b16|b8, "
        f"subgroup = shuffle|arithmetic, {'dot = dp4xi8toi32, ' if architecture.dot else ''}{products}"
        "subgroup_size_choices = [32], max_workgroup_sizes = [1024, 1024, 1024], "
        f"max_thread_count_per_workgroup = 1024, max_workgroup_memory_bytes = {architecture.shared}, "
        "max_workgroup_counts = [2147483647, 65535, 65535]>>}>]> : !hal.device"
    )


def find_ptxas() -> str | None:
    """Return the path of CUDA's assembler, or None if it is not installed.

    The package nvidia-cuda-nvcc-cu12, which still knows sm_70, comes before PATH.
    """
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package is not None else ():
        if (tool := Path(folder, "cuda_nvcc", "bin", "ptxas")).is_file():
            return str(tool)
    return shutil.which("ptxas")


KIND = Kind(
    name="cuda",
    summary="PTX for NVIDIA GPUs of this compute capability or a later one",
    options=(Option("arch", "the compute capability, sm_80 by default", tuple(ARCHITECTURES)),),
    make=_make_target,
    quirks=(
        Quirk(
            "IREE 3.13.0",
            "--iree-cuda-target does not know sm_90",
            "every architecture is described here in full",
            "tests/targets/test_cuda.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "--iree-cuda-target gives sm_70 and sm_75 float16 matrix instructions that begin with sm_80, on which "
            "iree-compile aborts ('Cannot select'), and gives sm_86 the shared memory of sm_80",
            "the descriptions of these architectures here have neither fault",
            "tests/targets/test_cuda.py",
        ),
        Quirk(
            "IREE 3.13.0",
            "no option enables TF32: float32 matrix products run on the plain cores",
            "none; bfloat16 products run on tensor cores",
            "tests/targets/test_cuda.py",
        ),
    ),
)
