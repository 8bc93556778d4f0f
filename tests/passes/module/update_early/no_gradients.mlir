// A module without gradients stays as it is.
// RUN: irongrad opt %s --pass update-early
// UNCHANGED

util.global private mutable @a : tensor<64xf32>

util.func public @f(%x: tensor<64xf32>) -> tensor<64xf32> {
  %a = util.global.load @a : tensor<64xf32>
  // CHECK: flow.dispatch @k::@first
  // CHECK: flow.dispatch @k::@update
  %first = flow.dispatch @k::@first(%x) : (tensor<64xf32>) -> tensor<64xf32>
  %held = util.optimization_barrier {irongrad.held} %first : tensor<64xf32>
  %new = flow.dispatch @k::@update(%a, %x) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
  util.global.store %new, @a : tensor<64xf32>
  util.return %held : tensor<64xf32>
}
