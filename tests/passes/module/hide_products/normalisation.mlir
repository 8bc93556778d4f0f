// The gradient of a normalisation adds products of tensors and of rows.
// RUN: irongrad opt %s --pass hide-products

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

flow.executable private @sums {
  flow.executable.export public @sums workgroups() -> (index, index, index) {
    %x, %y, %z = iree_tensor_ext.dispatch.workgroup_count_from_slice()
    flow.return %x, %y, %z : index, index, index
  }
  builtin.module {
    func.func @sums(%x: tensor<128x64x96xf32>, %y: tensor<128x64x96xbf16>, %m: tensor<96xf32>) -> tensor<128x96xf32> {
      %zero = arith.constant 0.0 : f32
      %empty = tensor.empty() : tensor<128x96xf32>
      %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
      %sums = linalg.generic {indexing_maps = [affine_map<(n, c, k) -> (n, k, c)>, affine_map<(n, c, k) -> (n, k, c)>,
          affine_map<(n, c, k) -> (c)>,
          affine_map<(n, c, k) -> (n, c)>], iterator_types = ["parallel", "parallel", "reduction"]}
          ins(%x, %y, %m : tensor<128x64x96xf32>, tensor<128x64x96xbf16>, tensor<96xf32>) outs(%zeros : tensor<128x96xf32>) {
      ^bb0(%a: f32, %b: bf16, %mean: f32, %sum: f32):
        %centred = arith.subf %a, %mean : f32
        %wide = arith.extf %b : bf16 to f32
        // CHECK: [[PRODUCT:%.+]] = arith.mulf
        // CHECK: [[SAME:%.+]] = math.copysign [[PRODUCT]], [[PRODUCT]]
        // CHECK: arith.addf {{.*}}, [[SAME]]
        %product = arith.mulf %centred, %wide : f32
        %next = arith.addf %sum, %product : f32
        linalg.yield %next : f32
      } -> tensor<128x96xf32>
      return %sums : tensor<128x96xf32>
    }
  }
}
