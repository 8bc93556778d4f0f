// If a value's size is unknown, IREE places the values of its allocation. The function's other allocations get offsets.
// RUN: irongrad opt %s --pass place-transients

// CHECK: util.func public @f([[N:%.+]]: index)
util.func public @f(%n: index) -> (index, index, index, index) {
  %c64 = arith.constant 64 : index
  // CHECK: arith.constant 640 : index
  %c640 = arith.constant 640 : index
  // CHECK-NEXT: [[TOTAL:%.+]] = arith.constant 640 : index
  // CHECK-NEXT: [[A:%.+]] = arith.constant 0 : index
  // CHECK-NEXT: [[B:%.+]] = arith.constant 0 : index
  %known:3 = stream.resource.pack slices({ [0, 1] = %c640, [2, 3] = %c64 }) : index
  // CHECK-NEXT: [[UNKNOWN:%.+]]:3 = stream.resource.pack slices({
  // CHECK-NEXT: [0, 1] = [[N]],
  %unknown:3 = stream.resource.pack slices({ [0, 1] = %n, [2, 3] = %c64 }) : index
  // CHECK: util.return [[TOTAL]], [[A]], [[B]], [[UNKNOWN]]#0
  util.return %known#0, %known#1, %known#2, %unknown#0 : index, index, index, index
}
