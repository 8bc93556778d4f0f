// An operand is packed before the outermost loop in which it stays the same.
// One from outside both loops is packed before both. A carry of the outer loop is packed before the inner loop.
// RUN: irongrad opt %s --pass pack-before-loops

#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [f32, f32, f32]>
#right = #iree_encoding.encoding<operand_index = 1, op_type = matmul, element_types = [f32, f32, f32]>

// CHECK: util.func public @f([[X:%.+]]: tensor<8x8xf32>, [[W:%.+]]: tensor<8x8xf32>)
util.func public @f(%x: tensor<8x8xf32>, %w: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  // CHECK: [[RIGHT:%.+]] = flow.tensor.encode [[W]]
  // CHECK-NEXT: scf.for {{.+}} iter_args([[STATE:%[^ ]+]] = [[X]])
  %end = scf.for %i = %first to %last step %one iter_args(%state = %x) -> tensor<8x8xf32> {
    // CHECK-NEXT: [[LEFT:%.+]] = flow.tensor.encode [[STATE]]
    // CHECK-NEXT: scf.for {{.+}} iter_args([[SUM:%[^ ]+]] = [[X]])
    %sums = scf.for %j = %first to %last step %one iter_args(%sum = %x) -> tensor<8x8xf32> {
      %a = flow.tensor.encode %state : tensor<8x8xf32> -> tensor<8x8xf32, #left>
      %b = flow.tensor.encode %w : tensor<8x8xf32> -> tensor<8x8xf32, #right>
      // CHECK-NEXT: flow.dispatch @k::@product([[LEFT]], [[RIGHT]], [[SUM]])
      %next = flow.dispatch @k::@product(%a, %b, %sum)
          : (tensor<8x8xf32, #left>, tensor<8x8xf32, #right>, tensor<8x8xf32>) -> tensor<8x8xf32>
      scf.yield %next : tensor<8x8xf32>
    }
    scf.yield %sums : tensor<8x8xf32>
  }
  util.return %end : tensor<8x8xf32>
}
