// A function and an initializer load the initial values that they read; no global holds these.
// RUN: irongrad opt %s --pass load-where-read

util.global private mutable @w : tensor<4xf32>
// CHECK-NOT: @__parameter_w
util.global private @__parameter_w = #flow.parameter.named<"state"::"w"> : tensor<4xf32>
// CHECK: util.global private @frozen = #flow.parameter.named<"base"::"w">
util.global private @frozen = #flow.parameter.named<"base"::"w"> : tensor<4xf32>

// CHECK: util.initializer
util.initializer {
  // CHECK: [[PACKED:%.+]] = flow.tensor.constant #flow.parameter.named<"state"::"w"> : tensor<4xf32>
  // CHECK: util.global.store [[PACKED]], @w
  %w = util.global.load immutable @__parameter_w : tensor<4xf32>
  util.global.store %w, @w : tensor<4xf32>
  util.return
}

// CHECK: util.func public @reset
util.func public @reset() -> tensor<4xf32> {
  // CHECK: [[RESET:%.+]] = flow.tensor.constant #flow.parameter.named<"state"::"w"> : tensor<4xf32>
  // CHECK: util.global.store [[RESET]], @w
  %w = util.global.load immutable @__parameter_w : tensor<4xf32>
  util.global.store %w, @w : tensor<4xf32>
  // CHECK: util.global.load immutable @frozen
  %frozen = util.global.load immutable @frozen : tensor<4xf32>
  util.return %frozen : tensor<4xf32>
}
