// 2 and 131 divide 262: IREE would compute two sums at once. A long chunk is read in vectors.
// RUN: irongrad opt %s --pass tile-sums

// CHECK: #iree_cpu.lowering_config<distribution = [16, 64, 0], vector_common_parallel = [1, 8, 0], vector_reduction = [0, 0, 16]>
util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

flow.executable private @sums {
  flow.executable.export public @sums workgroups() -> (index, index, index) {
    %x, %y, %z = iree_tensor_ext.dispatch.workgroup_count_from_slice()
    flow.return %x, %y, %z : index, index, index
  }
  builtin.module {
    func.func @sums(%arg0: !iree_tensor_ext.dispatch.tensor<readonly:tensor<1024x262x192xf32>>,
        %arg1: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<1024x262xf32>>) {
      %zero = arith.constant 0.0 : f32
      %x = iree_tensor_ext.dispatch.tensor.load %arg0, offsets = [0, 0, 0], sizes = [1024, 262, 192], strides = [1, 1, 1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<1024x262x192xf32>> -> tensor<1024x262x192xf32>
      %empty = tensor.empty() : tensor<1024x262xf32>
      %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<1024x262xf32>) -> tensor<1024x262xf32>
      // CHECK: linalg.generic
      // CHECK-SAME: compilation_info
      %sums = linalg.generic {indexing_maps = [affine_map<(r, c, k) -> (r, c, k)>, affine_map<(r, c, k) -> (r, c)>],
          iterator_types = ["parallel", "parallel", "reduction"]} ins(%x : tensor<1024x262x192xf32>)
          outs(%zeros : tensor<1024x262xf32>) {
      ^bb0(%in: f32, %sum: f32):
        %e = math.exp %in : f32
        %next = arith.addf %e, %sum : f32
        linalg.yield %next : f32
      } -> tensor<1024x262xf32>
      iree_tensor_ext.dispatch.tensor.store %sums, %arg1, offsets = [0, 0], sizes = [1024, 262], strides = [1, 1]
          : tensor<1024x262xf32> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<1024x262xf32>>
      return
    }
  }
}
