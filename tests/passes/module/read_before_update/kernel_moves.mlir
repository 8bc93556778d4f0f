// A kernel's result updates a tensor that has another reader. The kernel and its view move behind that reader.
// RUN: irongrad opt %s --pass read-before-update

util.func public @f(%x: tensor<4xf32>, %t: tensor<2x4xf32>) -> (tensor<8xf32>, tensor<2x4xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  // CHECK: flow.tensor.reshape %{{.+}} : tensor<2x4xf32>
  // CHECK-NEXT: [[READ:%.+]] = flow.dispatch @e::@g
  // CHECK-NEXT: [[NEW:%.+]] = flow.dispatch @e::@f
  // CHECK-NEXT: [[PART:%.+]] = flow.tensor.reshape [[NEW]]
  // CHECK-NEXT: flow.tensor.update [[PART]]
  %new = flow.dispatch @e::@f(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %part = flow.tensor.reshape %new : tensor<4xf32> -> tensor<1x4xf32>
  %view = flow.tensor.reshape %t : tensor<2x4xf32> -> tensor<8xf32>
  %read = flow.dispatch @e::@g(%view) : (tensor<8xf32>) -> tensor<8xf32>
  %u = flow.tensor.update %part, %t[%c1, %c0] : tensor<1x4xf32> -> %t as tensor<2x4xf32>
  util.return %read, %u : tensor<8xf32>, tensor<2x4xf32>
}
