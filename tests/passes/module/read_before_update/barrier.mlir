// Two results of one kernel update the same tensor, which no update has made. The second result gets a barrier.
// RUN: irongrad opt %s --pass read-before-update

util.func public @f(%x: tensor<4xf32>, %start: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %c4 = arith.constant 4 : index
  // CHECK: [[NEW:%.+]]:2 = flow.dispatch @e::@f
  // CHECK-NEXT: flow.tensor.update [[NEW]]#0
  // CHECK-NEXT: [[HELD:%.+]] = util.optimization_barrier [[NEW]]#1
  // CHECK-NEXT: flow.tensor.update [[HELD]]
  %new:2 = flow.dispatch @e::@f(%x) : (tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %a = flow.tensor.update %new#0, %start[%c4] : tensor<4xf32> -> %start as tensor<8xf32>
  %b = flow.tensor.update %new#1, %start[%c4] : tensor<4xf32> -> %start as tensor<8xf32>
  util.return %a, %b : tensor<8xf32>, tensor<8xf32>
}
