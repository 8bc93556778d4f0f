// Three batches of 17 rows take more of IREE's tiles than 51 rows do, whatever the tiles, so it packs the batches.
// RUN: irongrad opt %s --pass keep-packing-apart
// UNCHANGED

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#left = #iree_encoding.encoding<operand_index = 0, op_type = matmul, element_types = [f32, f32, f32]>
flow.executable private @copy {
  flow.executable.export public @copy
  builtin.module {
    func.func @copy(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<51x16xf32>>,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x17x16xf32, #left>>) {
      %rows = iree_tensor_ext.dispatch.tensor.load %from, offsets = [0, 0], sizes = [51, 16], strides = [1, 1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<51x16xf32>> -> tensor<51x16xf32>
      %batches = tensor.expand_shape %rows [[0, 1], [2]] output_shape [3, 17, 16]
          : tensor<51x16xf32> into tensor<3x17x16xf32>
      // CHECK: iree_encoding.set_encoding
      %packed = iree_encoding.set_encoding %batches : tensor<3x17x16xf32> -> tensor<3x17x16xf32, #left>
      iree_tensor_ext.dispatch.tensor.store %packed, %to, offsets = [0, 0, 0], sizes = [3, 17, 16], strides = [1, 1, 1]
          : tensor<3x17x16xf32, #left> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<3x17x16xf32, #left>>
      return
    }
  }
}
util.func public @f(%x: tensor<51x16xf32>) -> tensor<3x17x16xf32, #left> {
  %packed = flow.dispatch @copy::@copy(%x) : (tensor<51x16xf32>) -> tensor<3x17x16xf32, #left>
  util.return %packed : tensor<3x17x16xf32, #left>
}
