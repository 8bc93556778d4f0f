// An update of a tensor of the state is stored in another global. The pass adds a reader of the tensor at the end.
// RUN: irongrad opt %s --pass keep-state

util.global private mutable @w : tensor<8xf32>
util.global private mutable @other : tensor<8xf32>

util.func public @f(%part: tensor<4xf32>) {
  %c4 = arith.constant 4 : index
  // CHECK: [[OLD:%.+]] = util.global.load @w
  %old = util.global.load @w : tensor<8xf32>
  %new = flow.tensor.update %part, %old[%c4] : tensor<4xf32> -> %old as tensor<8xf32>
  // CHECK: util.global.store %{{.+}}, @other
  // CHECK-NEXT: util.optimization_barrier [[OLD]]
  util.global.store %new, @other : tensor<8xf32>
  util.return
}
