// Updates stay if no other reader of the tensor is between kernel and update. So do updates of an empty tensor.
// RUN: irongrad opt %s --pass read-before-update
// UNCHANGED

util.func public @f(%x: tensor<4xf32>, %t: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) {
  %c0 = arith.constant 0 : index
  // CHECK: flow.dispatch @e::@g
  %read = flow.dispatch @e::@g(%t) : (tensor<8xf32>) -> tensor<8xf32>
  // CHECK-NEXT: flow.dispatch @e::@f
  %new:3 = flow.dispatch @e::@f(%x) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>)
  %u = flow.tensor.update %new#0, %t[%c0] : tensor<4xf32> -> %t as tensor<8xf32>
  %empty = flow.tensor.empty : tensor<8xf32>
  %a = flow.tensor.update %new#1, %empty[%c0] : tensor<4xf32> -> %empty as tensor<8xf32>
  %b = flow.tensor.update %new#2, %empty[%c0] : tensor<4xf32> -> %empty as tensor<8xf32>
  util.return %read, %u, %a, %b : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>
}
