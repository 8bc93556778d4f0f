// Three batches of 31 rows take six tiles of 16 rows, as 93 rows do, so they are packed behind the kernel.
// RUN: irongrad opt %s --pass keep-packing-apart

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [f32, f32, f32]>
flow.executable private @copy {
  flow.executable.export public @copy
  builtin.module {
    // CHECK: func.func @copy({{.+}}, [[TO:%.+]]: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x31x16xf32>>) {
    func.func @copy(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<93x16xf32>>,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x31x16xf32, #left>>) {
      %rows = iree_tensor_ext.dispatch.tensor.load %from, offsets = [0, 0], sizes = [93, 16], strides = [1, 1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<93x16xf32>> -> tensor<93x16xf32>
      // CHECK: [[BATCHES:%.+]] = tensor.expand_shape
      %batches = tensor.expand_shape %rows [[0, 1], [2]] output_shape [3, 31, 16]
          : tensor<93x16xf32> into tensor<3x31x16xf32>
      // CHECK-NEXT: iree_tensor_ext.dispatch.tensor.store [[BATCHES]], [[TO]]
      %packed = iree_encoding.set_encoding %batches : tensor<3x31x16xf32> -> tensor<3x31x16xf32, #left>
      iree_tensor_ext.dispatch.tensor.store %packed, %to, offsets = [0, 0, 0], sizes = [3, 31, 16], strides = [1, 1, 1]
          : tensor<3x31x16xf32, #left> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x31x16xf32, #left>>
      return
    }
  }
}
util.func public @f(%x: tensor<93x16xf32>) -> tensor<3x31x16xf32, #left> {
  // CHECK: [[PLAIN:%.+]] = flow.dispatch @copy::@copy({{.+}}) : (tensor<93x16xf32>) -> tensor<3x31x16xf32>
  // CHECK-NEXT: [[PACKED:%.+]] = flow.tensor.encode [[PLAIN]]
  // CHECK-NEXT: util.return [[PACKED]]
  %packed = flow.dispatch @copy::@copy(%x) : (tensor<93x16xf32>) -> tensor<3x31x16xf32, #left>
  util.return %packed : tensor<3x31x16xf32, #left>
}
