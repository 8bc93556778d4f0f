// Without a base, parameters are loaded together.
// RUN: irongrad opt %s --pass map-base
// UNCHANGED

!constant = !stream.resource<constant>

util.global private @a : !constant
util.global private @b : !constant

util.initializer {
  %size = arith.constant 256 : index
  // CHECK: stream.resource.constants
  // CHECK-NOT: stream.resource.constants
  %a, %b, %read = stream.resource.constants :
      !constant{%size} = #stream.parameter.named<"state"::"a"> : tensor<8x8xf32>,
      !constant{%size} = #stream.parameter.named<"state"::"b"> : tensor<8x8xf32>
      => !stream.timepoint
  util.global.store %a, @a : !constant
  util.global.store %b, @b : !constant
  util.return
}
