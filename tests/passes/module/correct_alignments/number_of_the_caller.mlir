// Nothing is known of a number that the caller gives.
// RUN: irongrad opt %s --pass correct-alignments

// CHECK: arith.index_castui %{{.*}} {stream.alignment = 1 : index} : i64 to index

stream.executable private @copy {
  stream.executable.export public @kernel workgroups() -> (index, index, index) {
    %c1 = arith.constant 1 : index
    stream.return %c1, %c1, %c1 : index, index, index
  }
  builtin.module {
    func.func @kernel(%out: !stream.binding, %low: i32, %high: i32) {
      %c32 = arith.constant 32 : i64
      %a = arith.extui %low : i32 to i64
      %b = arith.extui %high : i32 to i64
      %c = arith.shli %b, %c32 : i64
      %d = arith.ori %a, %c : i64
      %offset = arith.index_castui %d {stream.alignment = 64 : index} : i64 to index
      util.optimization_barrier %offset : index
      return
    }
  }
}
util.func public @call(%buffer: !stream.resource<external>, %size: index, %row: index) -> !stream.timepoint {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0 : i32
  %c64 = arith.constant 64 : index
  %aligned = util.align %size, %c64 : index
  %known = arith.index_castui %aligned : index to i32
  %place = arith.index_castui %row : index to i32
  %done = stream.cmd.execute with(%buffer as %inner: !stream.resource<external>{%size}) {
    stream.cmd.dispatch @copy::@kernel(%known, %zero : i32, i32) {
      rw %inner[%c0 for %size] : !stream.resource<external>{%size}
    }
    stream.cmd.dispatch @copy::@kernel(%place, %zero : i32, i32) {
      rw %inner[%c0 for %size] : !stream.resource<external>{%size}
    }
  } => !stream.timepoint
  util.return %done : !stream.timepoint
}
