// An update of a tensor of the state is stored in the same global. It may happen in place, so no reader is added.
// RUN: irongrad opt %s --pass keep-state

util.global private mutable @w : tensor<8xf32>

util.func public @f(%part: tensor<4xf32>) {
  %c4 = arith.constant 4 : index
  %old = util.global.load @w : tensor<8xf32>
  %new = flow.tensor.update %part, %old[%c4] : tensor<4xf32> -> %old as tensor<8xf32>
  // CHECK: util.global.store
  // CHECK-NOT: util.optimization_barrier
  util.global.store %new, @w : tensor<8xf32>
  util.return
}
