// Batches of any number of rows may always take as many tiles. Their number is handed on.
// RUN: irongrad opt %s --pass keep-packing-apart

#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [f32, f32, f32]>
flow.executable private @copy {
  flow.executable.export public @copy
  builtin.module {
    // CHECK: func.func @copy({{.+}}, [[TO:%.+]]: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x?x16xf32>>) {
    func.func @copy(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<?x16xf32>>, %all: index, %each: index,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x?x16xf32, #left>>) {
      %read = flow.dispatch.tie_shape %from : !iree_tensor_ext.dispatch.tensor<readonly:tensor<?x16xf32>>{%all}
      // CHECK: [[TIED:%.+]] = flow.dispatch.tie_shape [[TO]]
      %written = flow.dispatch.tie_shape %to
          : !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x?x16xf32, #left>>{%each}
      %rows = iree_tensor_ext.dispatch.tensor.load %read, offsets = [0, 0], sizes = [%all, 16], strides = [1, 1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<?x16xf32>>{%all} -> tensor<?x16xf32>
      // CHECK: [[BATCHES:%.+]] = tensor.expand_shape
      %batches = tensor.expand_shape %rows [[0, 1], [2]] output_shape [3, %each, 16]
          : tensor<?x16xf32> into tensor<3x?x16xf32>
      // CHECK-NEXT: iree_tensor_ext.dispatch.tensor.store [[BATCHES]], [[TIED]]
      %packed = iree_encoding.set_encoding %batches : tensor<3x?x16xf32> -> tensor<3x?x16xf32, #left>
      iree_tensor_ext.dispatch.tensor.store %packed, %written, offsets = [0, 0, 0], sizes = [3, %each, 16],
          strides = [1, 1, 1] : tensor<3x?x16xf32, #left>
          -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x?x16xf32, #left>>{%each}
      return
    }
  }
}
// CHECK: util.func public @f({{.+}}, [[ALL:%.+]]: index, [[EACH:%.+]]: index)
util.func public @f(%x: tensor<?x16xf32>, %all: index, %each: index) -> tensor<3x?x16xf32, #left> {
  // CHECK-NEXT: [[PLAIN:%.+]] = flow.dispatch @copy::@copy({{.+}}) : ({{.+}}) -> tensor<3x?x16xf32>{[[EACH]]}
  // CHECK-NEXT: [[PACKED:%.+]] = flow.tensor.encode [[PLAIN]] : tensor<3x?x16xf32>{[[EACH]]} -> {{.+}}{[[EACH]]}
  // CHECK-NEXT: util.return [[PACKED]]
  %packed = flow.dispatch @copy::@copy(%x, %all, %each) : (tensor<?x16xf32>{%all}, index, index)
      -> tensor<3x?x16xf32, #left>{%each}
  util.return %packed : tensor<3x?x16xf32, #left>
}
