// RISC-V has tiles of other sizes: three batches of 20 rows take nine tiles of 7 rows, as 60 rows do.
// RUN: irongrad opt %s --pass keep-packing-apart

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-riscv_64",
    {target_triple = "riscv64-unknown-unknown-eabi-elf"}>]> : !hal.device
#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [f32, f32, f32]>
flow.executable private @copy {
  flow.executable.export public @copy
  builtin.module {
    // CHECK: func.func @copy({{.+}}, [[TO:%.+]]: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x20x16xf32>>) {
    func.func @copy(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<60x16xf32>>,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x20x16xf32, #left>>) {
      %rows = iree_tensor_ext.dispatch.tensor.load %from, offsets = [0, 0], sizes = [60, 16], strides = [1, 1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<60x16xf32>> -> tensor<60x16xf32>
      // CHECK: [[BATCHES:%.+]] = tensor.expand_shape
      %batches = tensor.expand_shape %rows [[0, 1], [2]] output_shape [3, 20, 16]
          : tensor<60x16xf32> into tensor<3x20x16xf32>
      // CHECK-NEXT: iree_tensor_ext.dispatch.tensor.store [[BATCHES]], [[TO]]
      %packed = iree_encoding.set_encoding %batches : tensor<3x20x16xf32> -> tensor<3x20x16xf32, #left>
      iree_tensor_ext.dispatch.tensor.store %packed, %to, offsets = [0, 0, 0], sizes = [3, 20, 16], strides = [1, 1, 1]
          : tensor<3x20x16xf32, #left> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x20x16xf32, #left>>
      return
    }
  }
}
util.func public @f(%x: tensor<60x16xf32>) -> tensor<3x20x16xf32, #left> {
  // CHECK: [[PLAIN:%.+]] = flow.dispatch @copy::@copy({{.+}}) : (tensor<60x16xf32>) -> tensor<3x20x16xf32>
  // CHECK-NEXT: [[PACKED:%.+]] = flow.tensor.encode [[PLAIN]]
  // CHECK-NEXT: util.return [[PACKED]]
  %packed = flow.dispatch @copy::@copy(%x) : (tensor<60x16xf32>) -> tensor<3x20x16xf32, #left>
  util.return %packed : tensor<3x20x16xf32, #left>
}
