"""Kernels share a few executables, and compute the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from iree.compiler import ir

from irongrad.mlir.walk import bytecode_of, inside
from irongrad.passes.module import join_executables
from irongrad.passes.module.join_executables import EXECUTABLES, JoinExecutables, linking_flags
from irongrad.pipeline.iree.compile import compile_module
from irongrad.targets import parse_target
from tests.fixtures.module_texts import TextModule, functions_of

COUNT = EXECUTABLES + 3


class SumsOfRows(TextModule):
    """A portable module with one kernel a matrix, which sums the rows."""

    sizes = tuple(range(2, 2 + COUNT))

    @property
    def text(self) -> str:
        """The module."""
        given = ", ".join(f"%x{n}: tensor<3x{n}xf32>" for n in self.sizes)
        kinds = ", ".join(["tensor<3xf32>"] * COUNT)
        sums = "\n".join(
            f"%r{n} = linalg.reduce ins(%x{n} : tensor<3x{n}xf32>) outs(%zeros : tensor<3xf32>) dimensions = [1] "
            "(%a: f32, %b: f32) { %s = arith.addf %a, %b : f32 linalg.yield %s : f32 }"
            for n in self.sizes
        )
        results = ", ".join(f"%r{n}" for n in self.sizes)
        return f"""func.func @f({given}) -> ({kinds}) {{
          %zero = arith.constant 0.0 : f32
          %empty = tensor.empty() : tensor<3xf32>
          %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<3xf32>) -> tensor<3xf32>
          {sums}
          return {results} : {kinds}
        }}"""


def check_sums(vmfb: bytes) -> None:
    """Check that compiled `SumsOfRows` computes the sums."""
    given = [np.arange(3 * n, dtype=np.float32).reshape(3, n) for n in SumsOfRows.sizes]
    loaded = functions_of(vmfb)
    for x, found in zip(given, loaded.f(*given), strict=True):
        np.testing.assert_array_equal(found.to_host(), x.sum(1))


def test_kernels_share_executables_and_compute_the_same(
    tmp_path: Path, around_pass: Callable[..., list[bytes]]
) -> None:
    streams = around_pass(JoinExecutables)
    compiled = compile_module(SumsOfRows(), parse_target("llvm-cpu"), tmp_path)
    before, after = map(_counts, streams)
    assert before == (COUNT, COUNT)
    assert after == (EXECUTABLES, COUNT)
    assert compiled.statistics.kernels == COUNT
    check_sums(compiled.vmfb)


@pytest.mark.parametrize(("two", "more", "libraries"), [(COUNT + 1, 2, 1), (COUNT, 3, 2), (2, 2, 4)])
def test_many_kernels_are_linked_into_several_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: int, more: int, libraries: int
) -> None:
    monkeypatch.setattr(join_executables, "FEWEST_OF_TWO_LIBRARIES", two)
    monkeypatch.setattr(join_executables, "FEWEST_OF_A_LIBRARY", more)
    compiled = compile_module(SumsOfRows(), parse_target("llvm-cpu"), tmp_path)
    assert compiled.vmfb.count(b"\x7fELF") == libraries
    check_sums(compiled.vmfb)


def test_there_is_one_library_where_kernels_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each kernel would be a library of its own."""
    monkeypatch.setattr(join_executables, "FEWEST_OF_TWO_LIBRARIES", 2)
    same = "".join(_kernel(f"k{i}", f"g{i % (COUNT - 2)}") for i in range(COUNT))
    joined = _joined(same)
    assert _counts(joined) == (EXECUTABLES + 2, COUNT)
    with ir.Context():
        assert linking_flags(ir.Module.parse(joined)) == ()


def _kernel(executable: str, function: str) -> str:
    return f"""stream.executable private @{executable} {{
      stream.executable.export public @{function}
      builtin.module {{ func.func @{function}() {{ return }} }}
    }}
    """


def _joined(text: str) -> bytes:
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
    JoinExecutables().run(module)
    return bytecode_of(module)


def _counts(stream: bytes) -> tuple[int, int]:
    """The number of executables, and of kernels."""
    with ir.Context():
        module = ir.Module.parse(stream)
        assert module.operation.verify()
        names = [op.name for op in inside(module.operation)]
    return names.count("stream.executable"), names.count("stream.executable.export")
