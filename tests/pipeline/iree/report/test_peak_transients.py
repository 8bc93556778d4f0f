"""The peak memory of the transients that a compiled module allocates."""

from __future__ import annotations

from irongrad.mlir.walk import parsed
from irongrad.pipeline.iree.report.peak_transients import transients_of

STREAM = """
util.func public @step() {
  %c64 = arith.constant 64 : index
  %c1000 = arith.constant 1000 : index
  %a, %ta = stream.resource.alloca uninitialized : !stream.resource<transient>{%c1000} => !stream.timepoint
  %b, %tb = stream.resource.alloca uninitialized : !stream.resource<transient>{%c64} => !stream.timepoint
  util.call @helper() : () -> ()
  %ua = stream.resource.dealloca await(%ta) => %a : !stream.resource<transient>{%c1000} => !stream.timepoint
  %c, %tc = stream.resource.alloca uninitialized : !stream.resource<transient>{%c64} => !stream.timepoint
  %d, %td = stream.resource.alloca uninitialized : !stream.resource<variable>{%c1000} => !stream.timepoint
  util.return
}
util.func private @helper() {
  %c8 = arith.constant 8 : index
  %a, %ta = stream.resource.alloca uninitialized : !stream.resource<transient>{%c8} => !stream.timepoint
  util.return
}
"""


def test_the_peak_counts_called_functions_and_transients_only() -> None:
    with parsed(STREAM.encode()) as stream:
        assert transients_of(stream) == {"step": 1072}
