// An update moves ahead of a later reader of another global's old value.
// RUN: irongrad opt %s --pass update-early

util.global private mutable @a : tensor<64xf32>
util.global private mutable @b : tensor<8x8xf32>

// CHECK: util.func public @f([[X:%.+]]: tensor<64xf32>, [[RATE:%.+]]: f64)
// CHECK-NEXT: [[A:%.+]] = util.global.load @a
// CHECK-NEXT: [[SCALE:%.+]] = flow.dispatch @k::@scale([[RATE]])
// CHECK-NEXT: [[B:%.+]] = util.global.load @b
// CHECK-NEXT: [[OLD:%.+]] = flow.tensor.reshape [[B]]
// CHECK-NEXT: [[FLAT:%.+]] = flow.tensor.reshape [[B]]
// CHECK-NEXT: [[FIRST:%.+]] = flow.dispatch @k::@first([[X]])
// CHECK-NEXT: [[GA:%.+]] = util.optimization_barrier {irongrad.gradient, irongrad.held} [[FIRST]]
// CHECK-NEXT: [[UPDATE_A:%.+]] = flow.dispatch @k::@update_a([[A]], [[GA]], [[SCALE]])
// CHECK-NEXT: [[SECOND:%.+]] = flow.dispatch @k::@second([[FLAT]], [[X]])
// CHECK-NEXT: [[THIRD:%.+]] = flow.dispatch @k::@third([[SECOND]])
// CHECK-NEXT: [[GB:%.+]] = util.optimization_barrier {irongrad.gradient, irongrad.held} [[THIRD]]
// CHECK-NEXT: [[UPDATE_B:%.+]] = flow.dispatch @k::@update_b([[OLD]], [[GB]])
// CHECK-NEXT: [[NEW:%.+]] = flow.tensor.reshape [[UPDATE_B]]
// CHECK-NEXT: util.global.store [[UPDATE_A]], @a
// CHECK-NEXT: util.global.store [[NEW]], @b
// CHECK-NEXT: util.return
util.func public @f(%x: tensor<64xf32>, %rate: f64) {
  %a = util.global.load @a : tensor<64xf32>
  %b = util.global.load @b : tensor<8x8xf32>
  %flat = flow.tensor.reshape %b : tensor<8x8xf32> -> tensor<64xf32>
  %first = flow.dispatch @k::@first(%x) : (tensor<64xf32>) -> tensor<64xf32>
  %second = flow.dispatch @k::@second(%flat, %x) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
  %third = flow.dispatch @k::@third(%second) : (tensor<64xf32>) -> tensor<64xf32>
  %ga = util.optimization_barrier {irongrad.held, irongrad.gradient} %first : tensor<64xf32>
  %gb = util.optimization_barrier {irongrad.held, irongrad.gradient} %third : tensor<64xf32>
  %scale = flow.dispatch @k::@scale(%rate) : (f64) -> tensor<f32>
  %na = flow.dispatch @k::@update_a(%a, %ga, %scale) : (tensor<64xf32>, tensor<64xf32>, tensor<f32>) -> tensor<64xf32>
  %old = flow.tensor.reshape %b : tensor<8x8xf32> -> tensor<64xf32>
  %nb = flow.dispatch @k::@update_b(%old, %gb) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
  %new = flow.tensor.reshape %nb : tensor<64xf32> -> tensor<8x8xf32>
  util.global.store %na, @a : tensor<64xf32>
  util.global.store %new, @b : tensor<8x8xf32>
  util.return
}
