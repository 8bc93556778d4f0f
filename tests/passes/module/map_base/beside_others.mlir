// Each tensor of the base is loaded alone, and all others together.
// RUN: irongrad opt %s --pass map-base

!constant = !stream.resource<constant>

util.global private @a : !constant
util.global private @b : !constant
util.global private @c : !constant
util.global private @d : !constant

util.initializer {
  %size = arith.constant 256 : index
  // CHECK: [[A:%.+]], [[READ_A:%.+]] = stream.resource.constants :
  // CHECK-NEXT: !stream.resource<constant>{%c256} = #stream.parameter.named<"base"::"a">
  // CHECK-NEXT: => !stream.timepoint
  // CHECK: [[C:%.+]], [[READ_C:%.+]] = stream.resource.constants :
  // CHECK-NEXT: !stream.resource<constant>{%c256} = #stream.parameter.named<"base"::"c">
  // CHECK-NEXT: => !stream.timepoint
  // CHECK: {{%.+}}:2, [[READ:%.+]] = stream.resource.constants :
  // CHECK-NEXT: #stream.parameter.named<"state"::"b">
  // CHECK-NEXT: #stream.parameter.named<"state"::"d">
  // CHECK-NEXT: => !stream.timepoint
  // CHECK: stream.timepoint.join max([[READ_A]], [[READ_C]], [[READ]])
  %a, %b, %c, %d, %read = stream.resource.constants :
      !constant{%size} = #stream.parameter.named<"base"::"a"> : tensor<8x8xf32>,
      !constant{%size} = #stream.parameter.named<"state"::"b"> : tensor<8x8xf32>,
      !constant{%size} = #stream.parameter.named<"base"::"c"> : tensor<8x8xf32>,
      !constant{%size} = #stream.parameter.named<"state"::"d"> : tensor<8x8xf32>
      => !stream.timepoint
  %ready:4 = stream.timepoint.await %read => %a, %b, %c, %d : !constant{%size}, !constant{%size}, !constant{%size}, !constant{%size}
  util.global.store %ready#0, @a : !constant
  util.global.store %ready#1, @b : !constant
  util.global.store %ready#2, @c : !constant
  util.global.store %ready#3, @d : !constant
  util.return
}
