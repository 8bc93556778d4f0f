// The state itself has initial values, too, and stays in its globals.
// RUN: irongrad opt %s --pass load-where-read
// UNCHANGED

// CHECK: util.global private mutable @w = #flow.parameter.named<"state"::"w">
util.global private mutable @w = #flow.parameter.named<"state"::"w"> : tensor<4xf32>

util.func public @read() -> tensor<4xf32> {
  // CHECK: util.global.load @w
  %w = util.global.load @w : tensor<4xf32>
  util.return %w : tensor<4xf32>
}
