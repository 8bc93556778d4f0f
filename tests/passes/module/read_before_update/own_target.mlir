// Two results of one kernel update the same part of a tensor. The second gets a tensor of its own.
// RUN: irongrad opt %s --pass read-before-update

util.func public @f(%x: tensor<4xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %c0 = arith.constant 0 : index
  %c4 = arith.constant 4 : index
  // CHECK: [[NEW:%.+]]:2 = flow.dispatch @e::@f
  // CHECK-NEXT: [[EMPTY:%.+]] = flow.tensor.empty
  // CHECK-NEXT: [[START:%.+]] = flow.tensor.update %{{.+}}, [[EMPTY]][%c0]
  // CHECK-NEXT: flow.tensor.update [[NEW]]#0, [[START]][%c4]
  // CHECK-NEXT: [[OWN:%.+]] = flow.tensor.update [[NEW]]#1, [[EMPTY]][%c4]
  // CHECK-NEXT: flow.tensor.update %{{.+}}, [[OWN]][%c0]
  %new:2 = flow.dispatch @e::@f(%x) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %empty = flow.tensor.empty : tensor<8xf32>
  %start = flow.tensor.update %x, %empty[%c0] : tensor<4xf32> -> %empty as tensor<8xf32>
  %a = flow.tensor.update %new#0, %start[%c4] : tensor<4xf32> -> %start as tensor<8xf32>
  %b = flow.tensor.update %new#1, %start[%c4] : tensor<4xf32> -> %start as tensor<8xf32>
  util.return %a, %b : tensor<8xf32>, tensor<8xf32>
}
