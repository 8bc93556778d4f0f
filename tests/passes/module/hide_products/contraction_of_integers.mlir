// A contraction may convert whole numbers.
// RUN: irongrad opt %s --pass hide-products
// UNCHANGED

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device

flow.executable private @sums {
  flow.executable.export public @sums workgroups() -> (index, index, index) {
    %x, %y, %z = iree_tensor_ext.dispatch.workgroup_count_from_slice()
    flow.return %x, %y, %z : index, index, index
  }
  builtin.module {
    func.func @sums(%x: tensor<128x64x96xf32>, %v: tensor<64xi64>) -> tensor<128x96xf32> {
      %zero = arith.constant 0.0 : f32
      %empty = tensor.empty() : tensor<128x96xf32>
      %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
      %sums = linalg.generic {indexing_maps = [affine_map<(n, c, k) -> (n, k, c)>, affine_map<(n, c, k) -> (k)>,
          affine_map<(n, c, k) -> (n, c)>], iterator_types = ["parallel", "parallel", "reduction"]}
          ins(%x, %v : tensor<128x64x96xf32>, tensor<64xi64>) outs(%zeros : tensor<128x96xf32>) {
      ^bb0(%a: f32, %b: i64, %sum: f32):
        // CHECK-NOT: math.copysign
        %number = arith.sitofp %b : i64 to f32
        %product = arith.mulf %a, %number : f32
        %next = arith.addf %product, %sum : f32
        linalg.yield %next : f32
      } -> tensor<128x96xf32>
      return %sums : tensor<128x96xf32>
    }
  }
}
