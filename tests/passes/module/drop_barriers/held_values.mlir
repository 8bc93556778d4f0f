// The pass drops the barriers that carry our mark. A user's own barrier stays.
// RUN: irongrad opt %s --pass drop-barriers

// CHECK-LABEL: util.func public @step
// CHECK-SAME: ([[X:%.+]]: tensor<4xf32>, [[Y:%.+]]: tensor<4xf32>)
util.func public @step(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %held = util.optimization_barrier {irongrad.held} %x : tensor<4xf32>
  // CHECK-NEXT: [[OWN:%.+]] = util.optimization_barrier [[Y]]
  %own = util.optimization_barrier %y : tensor<4xf32>
  // CHECK-NEXT: util.return [[X]], [[OWN]]
  util.return %held, %own : tensor<4xf32>, tensor<4xf32>
}
