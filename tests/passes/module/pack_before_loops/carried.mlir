// An operand that the loop carries is packed in each iteration.
// RUN: irongrad opt %s --pass pack-before-loops
// UNCHANGED

#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [f32, f32, f32]>

util.func public @f(%x: tensor<8x8xf32>, %w: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  // CHECK: scf.for {{.+}} iter_args([[STATE:%[^ ]+]] =
  %end = scf.for %i = %first to %last step %one iter_args(%state = %x) -> tensor<8x8xf32> {
    // CHECK-NEXT: flow.tensor.encode [[STATE]]
    %packed = flow.tensor.encode %state : tensor<8x8xf32> -> tensor<8x8xf32, #left>
    %next = flow.dispatch @k::@product(%packed, %w)
        : (tensor<8x8xf32, #left>, tensor<8x8xf32>) -> tensor<8x8xf32>
    scf.yield %next : tensor<8x8xf32>
  }
  util.return %end : tensor<8x8xf32>
}
