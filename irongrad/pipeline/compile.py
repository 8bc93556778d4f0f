"""AssembledModule -> .vmfb: iree-compile, in a process of its own."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import iree.compiler.tools.binaries as iree_binaries

from irongrad.pipeline.branches import separate_branch_operands
from irongrad.pipeline.diagnostics import toolchain_error
from irongrad.pipeline.portable import PortableModule
from irongrad.pipeline.retarget import retarget
from irongrad.pipeline.statistics import STATISTICS, Statistics, read_statistics, statistics_flags
from irongrad.pipeline.traffic import traffic_of
from irongrad.pipeline.transients import transients_of
from irongrad.runtime.errors import ToolchainError
from irongrad.targets import Target

# Hyperparameters are float64 scalars of the VM, and their arithmetic stays in float64.
COMMON_FLAGS = ("--iree-input-demote-f64-to-f32=false", "--iree-vm-target-extension-f64")

DATA_TILING = "--iree-opt-data-tiling"

_PROBE = """
func.func @probe(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = arith.addf %x, %x : tensor<4xf32>
  return %y : tensor<4xf32>
}
"""


@dataclass(frozen=True)
class CompiledModule:
    """A .vmfb in memory.

    Attributes:
        target: what it was compiled for.
        flags: all flags of iree-compile.
        vmfb: its bytes.
        architecture: the CPU architecture, empty where that does not apply.
        features: the CPU features that the code was allowed to use.
        statistics: what the compiler says of the program.
    """

    target: Target
    flags: tuple[str, ...]
    vmfb: bytes
    architecture: str
    features: tuple[str, ...]
    statistics: Statistics


def compile_module(module: PortableModule, target: Target, scratch: Path) -> CompiledModule:
    """Compile `module` for `target`.

    Raises:
        ToolchainError: IREE failed; with its diagnostic, the user's line where known, and the kept module.
    """
    source, output = scratch / "step.mlirbc", scratch / f"step.{target.name}.vmfb"
    source.write_bytes(retarget(module, target))
    flags = (*COMMON_FLAGS, *target.flags)
    compile_ = _compile_with_branches if "scf." in module.text else _compile_directly
    try:
        compile_(flags, source, output)
    except _DataTilingError:
        flags = _without_data_tiling(flags)
        compile_(flags, source, output)
    architecture, features = _cpu_of(flags)
    transients = transients_of(_phase(source, "stream").read_bytes())
    statistics = read_statistics(
        output.with_name(STATISTICS), transients, traffic_of(_phase(source, "flow").read_bytes())
    )
    return CompiledModule(target, flags, output.read_bytes(), architecture, features, statistics)


class _DataTilingError(ToolchainError):
    """iree-compile failed for data tiling.

    IREE 3.13.0 ends by a signal on a product of matrices to which something made of indices is added and that is then
    transposed: `(x @ x.mT + torch.eye(n)).mT`; and it refuses its own tiles, in one of several ways, for products of
    which a size is not known. Such a module is compiled again without it: slower code, and its flags in the manifest
    say so. tests/pipeline/test_toolchain.py tells when that is gone.
    """


_OF_UNKNOWN_SIZES = (
    "stack allocation size overflows 64 bits",
    "expected no unbounded stack allocations",
    "no basis element may be statically non-positive",
    "exceeded stack allocation limit",
)


def _without_data_tiling(flags: Sequence[str]) -> tuple[str, ...]:
    return tuple(f for f in flags if f != DATA_TILING)


def _compile_with_branches(flags: Sequence[str], source: Path, output: Path) -> None:
    """Compile a module with structured control flow; in between, its branches are made safe."""
    _compile_to_stream(flags, source, output)
    stream, vm = _phase(source, "stream"), _phase(source, "vm")
    _compile((*flags, "--compile-from=stream", "--compile-to=vm", "--emit-mlir-bytecode"), stream, vm)
    vm.write_bytes(separate_branch_operands(vm.read_bytes()))
    _compile((*flags, "--compile-from=vm"), vm, output)


def _compile_directly(flags: Sequence[str], source: Path, output: Path) -> None:
    _compile_to_stream(flags, source, output)
    _compile((*flags, "--compile-from=stream"), _phase(source, "stream"), output)


def _compile_to_stream(flags: Sequence[str], source: Path, output: Path) -> None:
    """Compile by way of the phase that lists the kernels to the one that allocates, and write the statistics."""
    flow, stream = _phase(source, "flow"), _phase(source, "stream")
    statistics = statistics_flags(output.with_name(STATISTICS))
    _compile((*flags, "--compile-to=flow", "--emit-mlir-bytecode"), source, flow)
    _compile((*flags, *statistics, "--compile-from=flow", "--compile-to=stream", "--emit-mlir-bytecode"), flow, stream)


def _phase(source: Path, name: str) -> Path:
    """The file of the module `source` as it is after a phase of IREE's compilation."""
    return source.with_suffix(f".{name}.mlirbc")


def _compile(flags: Sequence[str], source: Path, output: Path) -> None:
    result = _iree_compile([*flags, str(source), "-o", str(output)])
    if DATA_TILING in flags and (result.returncode < 0 or any(text in result.stderr for text in _OF_UNKNOWN_SIZES)):
        raise _DataTilingError(f"iree-compile fails with {DATA_TILING}: {result.returncode}")
    if result.returncode != 0:
        raise toolchain_error("iree-compile", result, source)


def _iree_compile(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    tool = iree_binaries.find_tool("iree-compile")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)


@functools.cache
def _cpu_of(flags: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Ask the compiler which CPU its flags mean; `host` says nothing to another machine."""
    with tempfile.TemporaryDirectory(prefix="irongrad-") as scratch:
        probe = Path(scratch) / "probe.mlir"
        probe.write_text(_PROBE)
        result = _iree_compile([*flags, "--compile-to=executable-configurations", str(probe), "-o", "-"])
    if result.returncode != 0:
        raise ToolchainError(f"iree-compile cannot describe its target: {result.stderr[-300:]}")
    triple = re.search(r'target_triple = "([^-"]+)-', result.stdout)
    features = re.search(r'cpu_features = "([^"]*)"', result.stdout)
    names = features.group(1).split(",") if features else []
    architecture = triple.group(1).replace("arm64", "aarch64") if triple else ""  # as Apple's triples have it
    return architecture, tuple(dict.fromkeys(n[1:] for n in names if n.startswith("+")))
