// A kernel's result updates a tensor that an update behind the kernel has made, and what that one updates has another
// reader. IREE would move the first update before the kernel, and so before the reader. The kernel moves instead.
// RUN: irongrad opt %s --pass read-before-update

util.func public @f(%x: tensor<4xf32>, %t: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>, tensor<4xf32>) {
  %c0 = arith.constant 0 : index
  %c4 = arith.constant 4 : index
  // CHECK: [[FIRST:%.+]] = flow.dispatch @e::@first
  // CHECK-NEXT: flow.dispatch @e::@g
  // CHECK-NEXT: [[START:%.+]] = flow.tensor.update [[FIRST]]
  // CHECK-NEXT: [[SECOND:%.+]] = flow.dispatch @e::@second
  // CHECK-NEXT: flow.tensor.update [[SECOND]], [[START]]
  %first = flow.dispatch @e::@first(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %second = flow.dispatch @e::@second(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %read = flow.dispatch @e::@g(%t) : (tensor<8xf32>) -> tensor<8xf32>
  %start = flow.tensor.update %first, %t[%c0] : tensor<4xf32> -> %t as tensor<8xf32>
  %u = flow.tensor.update %second, %start[%c4] : tensor<4xf32> -> %start as tensor<8xf32>
  util.return %read, %u, %first : tensor<8xf32>, tensor<8xf32>, tensor<4xf32>
}
