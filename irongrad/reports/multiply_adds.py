"""The most float32 operations a second of this machine's CPU: chains of multiply-adds in registers.

numpy's BLAS is no measure of every CPU: on a Zen 5, OpenBLAS multiplies with half of the width of AVX-512.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import iree.runtime as ireert
import numpy as np

from irongrad.runtime.calls import invoke
from irongrad.runtime.stacks import give_workers_stack
from irongrad.runtime.transfer import to_device
from irongrad.runtime.vm_instance import open_device, vm_instance
from irongrad.targets import parse_target

# Each element takes part in several chains of multiply-adds, which do not wait for each other. A vector's chains fit
# into the registers, and the next vector's into the CPU's reorder buffer. Other numbers reach less on Zen 5.
_ELEMENTS, _CHAINS, _LENGTH = 1 << 20, 4, 16
_REPETITIONS = 40
_TARGET = parse_target("llvm-cpu")


def multiply_add_rate() -> float:
    """Return the operations a second with all threads, the best of several runs; 0.0 if nothing can be compiled."""
    try:
        from irongrad.mlir.tools import run_tool
    except ImportError:
        return 0.0
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "f.mlir", Path(folder) / "f.vmfb"
        source.write_text(_program())
        if run_tool("iree-compile", [*_TARGET.flags, str(source), "-o", str(output)]).returncode:
            return 0.0
        return 2 * _ELEMENTS * _CHAINS * _LENGTH / _least_seconds(output.read_bytes())


def _program() -> str:
    kind = f"tensor<{_ELEMENTS}xf32>"
    starts = [f"%c{c} = arith.constant 0.{c + 1} : f32\n%f{c}_0 = arith.addf %x, %c{c} : f32" for c in range(_CHAINS)]
    steps = [f"%f{c}_{i + 1} = math.fma %f{c}_{i}, %a, %b : f32" for i in range(_LENGTH) for c in range(_CHAINS)]
    ends = [f"%f{c}_{_LENGTH}" for c in range(_CHAINS)]
    sums = [f"%s{c} = arith.addf {f'%s{c - 1}' if c > 1 else ends[0]}, {ends[c]} : f32" for c in range(1, _CHAINS)]
    body = "\n".join((*starts, *steps, *sums))
    return f"""
    #same = affine_map<(i) -> (i)>
    func.func @f(%given: {kind}) -> {kind} {{
      %a = arith.constant 0.999 : f32
      %b = arith.constant 0.001 : f32
      %empty = tensor.empty() : {kind}
      %result = linalg.generic {{indexing_maps = [#same, #same], iterator_types = ["parallel"]}}
          ins(%given : {kind}) outs(%empty : {kind}) {{
      ^bb0(%x: f32, %unused: f32):
        {body}
        linalg.yield %s{_CHAINS - 1} : f32
      }} -> {kind}
      return %result : {kind}
    }}"""


def _least_seconds(vmfb: bytes) -> float:
    give_workers_stack()
    instance, device = vm_instance(), open_device(_TARGET.device)
    module = ireert.VmModule.copy_buffer(instance, vmfb)
    context = ireert.VmContext(instance, modules=[ireert.create_hal_module(instance, device), module])
    function, given = module.lookup_function("f"), to_device(device, np.ones(_ELEMENTS, np.float32))
    found = []
    for _ in range(_REPETITIONS):
        arguments, results = ireert.VmVariantList(1), ireert.VmVariantList(1)
        arguments.push_ref(given)
        start = time.perf_counter()
        invoke(context, _TARGET.device, function, arguments, results)
        found.append(time.perf_counter() - start)
    return min(found)
