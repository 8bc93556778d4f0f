// Values of known sizes get offsets in one allocation. Values with disjoint live ranges share an offset.
// RUN: irongrad opt %s --pass place-transients

util.func public @f() -> (index, index, index) {
  %c64 = arith.constant 64 : index
  // CHECK: arith.constant 640 : index
  %c640 = arith.constant 640 : index
  %total, %first, %second = stream.resource.pack slices({ [0, 1] = %c640, [2, 3] = %c64 }) : index
  // CHECK-NEXT: [[TOTAL:%.+]] = arith.constant 640 : index
  // CHECK-NEXT: [[FIRST:%.+]] = arith.constant 0 : index
  // CHECK-NEXT: [[SECOND:%.+]] = arith.constant 0 : index
  // CHECK-NEXT: util.return [[TOTAL]], [[FIRST]], [[SECOND]] : index, index, index
  util.return %total, %first, %second : index, index, index
}
