"""Keep IREE from cloning a splat into some of its readers around a loop.

IREE 3.13.0 divides a function into regions that a device executes, and clones a splat into each region that reads it
(Stream/Analysis/Partitioning/ReferencePartitioning.cpp). Around a loop it may find no region for one of the clones, and
leaves it outside: "streamable op expected to be in an execution region". The number of true rows of a bucket is such a
splat, and a recurrent layer such a loop. tests/passes/module/test_keep_splats_apart.py tells when it is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import BARRIER
from irongrad.mlir.walk import LOOPS, functions_of, inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_SPLAT = "stream.tensor.splat"


@dataclass(frozen=True)
class KeepSplatsApart(ModulePass):
    """Put a splat that several operations read behind a barrier, in a function with a loop.

    Before:
        %n = stream.tensor.splat %rows : i64 -> tensor<i64> in !stream.resource<*>{%size}
    After:
        %0 = stream.tensor.splat %rows : i64 -> tensor<i64> in !stream.resource<*>{%size}
        %n = util.optimization_barrier %0 : !stream.resource<*>

    The splat has one reader then, and no clones.
    """

    name: ClassVar[str] = "keep-splats-apart"
    required: ClassVar[str] = "IREE leaves a clone of a splat outside of what a device executes"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        bodies = [inside(function) for function in functions_of(module)]
        around_loops = [op for body in bodies if any(op.name in LOOPS for op in body) for op in body]
        splats = [op for op in around_loops if op.name == _SPLAT and len(list(op.results[0].uses)) > 1]
        for splat in splats:
            value = splat.results[0]
            with splat.location, ir.InsertionPoint.after(splat):
                held = ir.Operation.create(BARRIER, [value.type], [value])
            value.replace_all_uses_except(held.result, held)
        return PassResult(bool(splats), {"splats": len(splats)})


PASS = KeepSplatsApart
