// The pass places the largest values first. Smaller values that are live at the same time go above them.
// RUN: irongrad opt %s --pass 'place-transients{alignment=64}'

util.func public @f() -> (index, index, index, index) {
  %c64 = arith.constant 64 : index
  %c100 = arith.constant 100 : index
  %c640 = arith.constant 640 : index
  // CHECK-NOT: stream.resource.pack
  // CHECK: [[TOTAL:%.+]] = arith.constant 768 : index
  // CHECK-NEXT: [[A:%.+]] = arith.constant 640 : index
  // CHECK-NEXT: [[B:%.+]] = arith.constant 0 : index
  // CHECK-NEXT: [[C:%.+]] = arith.constant 0 : index
  // CHECK-NEXT: util.return [[TOTAL]], [[A]], [[B]], [[C]]
  %total, %a, %b, %c = stream.resource.pack slices({ [0, 1] = %c100, [1, 2] = %c640, [3, 4] = %c64 }) : index
  util.return %total, %a, %b, %c : index, index, index, index
}
