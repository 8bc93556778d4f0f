"""Loops update their carries in place, but not values that are read again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from iree.compiler.tools.binaries import find_tool
from torch._higher_order_ops.scan import scan

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.mlir.walk import functions_of, inside, parsed
from irongrad.passes.module.allocate_apart import AllocateApart
from irongrad.passes.module.loops_in_place import LoopsInPlace
from irongrad.passes.module.place_transients import PlaceTransients
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation
from irongrad.pipeline.lower.importer import import_functions
from irongrad.targets import parse_target

X, ROWS = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(0, 2, 40).reshape(5, 8)


def recurrence(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return scan(lambda state, row: ((state * row).sin(), state + row), x * 2, rows)


def written_around(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each iteration changes its own copy of a value from outside of the loop."""
    table, places = x * 2, torch.tensor([1, 3])

    def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        changed = table.index_put((places,), row[None].expand(2, 8), accumulate=True)
        return state + changed, changed.sum(0)

    return scan(step, x, rows)


def rows_written_around(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each iteration changes a row of its own copy of a value from outside of the loop, and a row of zeros."""
    table = x * 2

    def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.slice_scatter(torch.zeros(8, 8), state[:1], 0, 5, 6)
        return torch.slice_scatter(table, (state[0] @ x)[None] * row, 0, 2, 3), zeros

    return scan(step, x, rows)


def begun_twice(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two carries that start as one value; each changes in its own way."""
    start = x * 2

    def step(carries: tuple[torch.Tensor, ...], row: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        one, other = carries
        one = torch.slice_scatter(one, row[None], 0, 2, 3)
        return (one, torch.slice_scatter(other, -row[None], 0, 3, 4)), (one * other).sum(0)

    (one, other), sums = scan(step, (start, start.clone()), rows)
    return one, other, sums


def begun_around(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A loop in a loop; the inner carry starts as a value from outside of both."""
    start = x * 2

    def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def inner(table: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.slice_scatter(table, (row * other)[None], 0, 2, 3), table.sum(0)

        table, sums = scan(inner, start, rows)
        return state + table, sums.sum(0)

    return scan(step, x, rows)


def read_after(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = x * 2
    last, _ = scan(lambda state, row: (torch.slice_scatter(state, row[None], 0, 2, 3), row), start, rows)
    return last, start.sin()


@pytest.mark.parametrize("function", [written_around, rows_written_around, begun_twice, begun_around, read_after])
def test_a_value_that_is_read_again_is_not_overwritten(function):
    """Compilation verifies the results."""
    ig.compile_function(function, (X, ROWS))


def stream_of(function: Callable[..., object], scratch: Path) -> tuple[bytes, Compilation]:
    """The module of a function after the phase `stream`, and its compilation."""
    target = parse_target("llvm-cpu")
    graph = trace_function(flat_function(function, (X, ROWS), gradients=False), function)
    source = scratch / "step.mlirbc"
    source.write_bytes(import_functions(graph, scratch).modules.linalg)
    compilation = Compilation.of(source, target, [*COMMON_FLAGS, *target.flags])
    compilation.to_flow()
    return compilation.to_stream(), compilation


def copies(stream: bytes) -> int:
    with parsed(stream) as module:
        return sum(op.name == "stream.cmd.copy" for f in functions_of(module) for op in inside(f))


def test_carries_are_not_copied_and_iree_still_would_copy_them(tmp_path, without):
    """When the second assertion fails, IREE elides copies of a buffer onto itself, and the pass can go."""
    assert copies(stream_of(recurrence, tmp_path)[0]) == 0
    without(LoopsInPlace)
    assert copies(stream_of(recurrence, tmp_path)[0]) > 0


def test_without_our_passes_the_parts_are_the_whole_phase(tmp_path, without, is_the_whole_phase):
    for kind in (LoopsInPlace, AllocateApart, PlaceTransients):
        without(kind)
    is_the_whole_phase(*stream_of(recurrence, tmp_path))


HEAD = """
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c8 = arith.constant 8 : index
  %c64 = arith.constant 64 : index
  %five = arith.constant 5 : i32
  %start = stream.async.splat %five : i32 -> !stream.resource<*>{%c64}"""

AROUND = (
    HEAD
    + """
  %last = scf.for %i = %c0 to %c8 step %c1 iter_args(%s = %part) -> !stream.resource<*> {
    %copy = stream.async.clone %start : !stream.resource<*>{%c64} -> !stream.resource<*>{%c64}
    %new = stream.async.update %part, %copy[%c0 to %c8] : !stream.resource<*>{%c8} -> %copy as !stream.resource<*>{%c64}
    scf.yield %new : !stream.resource<*>
  }
  util.return %last : !stream.resource<*>
"""
)

TWICE = (
    HEAD
    + """
  %ends:2 = scf.for %i = %c0 to %c8 step %c1 iter_args(%s = %start, %t = %start)
      -> (!stream.resource<*>, !stream.resource<*>) {
    %copy = stream.async.clone %s : !stream.resource<*>{%c64} -> !stream.resource<*>{%c64}
    %new = stream.async.update %part, %copy[%c0 to %c8] : !stream.resource<*>{%c8} -> %copy as !stream.resource<*>{%c64}
    scf.yield %new, %t : !stream.resource<*>, !stream.resource<*>
  }
  util.return %ends#1 : !stream.resource<*>
"""
)


@pytest.mark.parametrize("body", [AROUND, TWICE], ids=["around", "twice"])
def test_iree_still_leaves_out_a_copy_that_is_needed(body, tmp_path):
    """When this fails, `LoopsInPlace` may no longer need to hide values from IREE's analysis."""
    source = tmp_path / "loop.mlir"
    source.write_text(f"util.func public @f(%part: !stream.resource<*>) -> !stream.resource<*> {{{body}}}")
    run = [find_tool("iree-opt"), "--iree-stream-elide-async-copies", str(source)]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    assert "stream.async.clone" not in done.stdout
