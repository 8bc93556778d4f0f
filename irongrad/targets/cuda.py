"""cuda: PTX for NVIDIA's GPUs, which the driver compiles to machine code when the module is loaded."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from irongrad.targets.base import Kind, Option, Quirk, Target

# By compute capability: PTX features, matrix units, and bytes of shared memory that a block may ask for (CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability"). Up to sm_89 as IREE 3.13.0's --iree-cuda-target
# has them (compiler/src/iree/compiler/Codegen/Dialect/GPU/TargetUtils/KnownTargets.cpp).
_WMMA = ("NV_WMMA_F32_16x16x16_F16", "NV_WMMA_F16_16x16x16_F16")
_MMA_SYNC = ("NV_MMA_SYNC_F32_16x8x16_F16", "NV_MMA_SYNC_F16_16x8x16_F16", "NV_MMA_SYNC_F32_16x8x16_BF16")
_SM_90_SHARED_BYTES = 227 * 1024
KNOWN = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89")

_SM_90 = (
    '#hal.device.target<"cuda", [#hal.executable.target<"cuda", "cuda-nvptx-fb", {iree_codegen.target_info = '
    '#iree_gpu.target<arch = "sm_90", features = "+ptx84", wgp = <compute = fp64|fp32|fp16|int64|int32|int16|int8, '
    "storage = b64|b32|b16|b8, subgroup = shuffle|arithmetic, dot = dp4xi8toi32, "
    f"mma = [{', '.join(f'<{m}>' for m in (*_MMA_SYNC, *_WMMA))}], subgroup_size_choices = [32], "
    "max_workgroup_sizes = [1024, 1024, 1024], max_thread_count_per_workgroup = 1024, "
    f"max_workgroup_memory_bytes = {_SM_90_SHARED_BYTES}, "
    "max_workgroup_counts = [2147483647, 65535, 65535]>>}>]> : !hal.device"
)


def _make(name: str, options: dict[str, str]) -> Target:
    arch = options.get("arch", "sm_80")
    known = ("--iree-hal-target-device=cuda", f"--iree-cuda-target={arch}")
    flags = known if arch in KNOWN else (f"--iree-hal-target-device={_SM_90}",)
    return Target(name=name, backend="cuda", device="cuda", flags=flags)


def find_ptxas() -> str | None:
    """CUDA's assembler: that of the package nvidia-cuda-nvcc-cu12, which knows sm_70 still, or else the one on PATH."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package is not None else ():
        if (tool := Path(folder, "cuda_nvcc", "bin", "ptxas")).is_file():
            return str(tool)
    return shutil.which("ptxas")


KIND = Kind(
    name="cuda",
    summary="PTX for NVIDIA GPUs of this compute capability or a later one",
    options=(Option("arch", "the compute capability, sm_80 by default", (*KNOWN, "sm_90")),),
    make=_make,
    quirks=(
        Quirk(
            "IREE 3.13.0",
            "--iree-cuda-target does not know sm_90",
            "the device is described in full: sm_89's description with sm_90's shared memory, without 8-bit floats",
            "tests/targets/test_cuda.py",
        ),
    ),
)
