// An operand that stays the same in a loop is packed before the loop.
// RUN: irongrad opt %s --pass pack-before-loops

#right = #iree_encoding.encoding<operand_index = 1, op_type = matmul, element_types = [f32, f32, f32]>

// CHECK: util.func public @f([[X:%.+]]: tensor<8x8xf32>, [[W:%.+]]: tensor<8x8xf32>)
util.func public @f(%x: tensor<8x8xf32>, %w: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  // CHECK: [[PACKED:%.+]] = flow.tensor.encode [[W]]
  // CHECK-NEXT: scf.for {{.+}} iter_args([[STATE:%[^ ]+]] = [[X]])
  %end = scf.for %i = %first to %last step %one iter_args(%state = %x) -> tensor<8x8xf32> {
    %packed = flow.tensor.encode %w : tensor<8x8xf32> -> tensor<8x8xf32, #right>
    // CHECK-NEXT: [[NEXT:%.+]] = flow.dispatch @k::@product([[STATE]], [[PACKED]])
    // CHECK-NEXT: scf.yield [[NEXT]]
    %next = flow.dispatch @k::@product(%state, %packed)
        : (tensor<8x8xf32>, tensor<8x8xf32, #right>) -> tensor<8x8xf32>
    scf.yield %next : tensor<8x8xf32>
  }
  util.return %end : tensor<8x8xf32>
}
