// Values with the same live range keep IREE's places, because no placement takes less than their sum.
// RUN: irongrad opt %s --pass place-transients
// UNCHANGED

util.func public @f() -> (index, index, index) {
  %c64 = arith.constant 64 : index
  %c640 = arith.constant 640 : index
  // CHECK: stream.resource.pack
  %total, %first, %second = stream.resource.pack slices({ [0, 2] = %c640, [1, 3] = %c64 }) : index
  util.return %total, %first, %second : index, index, index
}
