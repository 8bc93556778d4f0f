// A kernel of ours multiplies operands of bfloat16 as such, adds the bias and rounds. It widens no operand.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f,+avx512bf16,+amx-bf16", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]>
    : !hal.device

#both = affine_map<(d0, d1) -> (d0, d1)>
#columns = affine_map<(d0, d1) -> (d1)>

// CHECK: stream.executable private @[[KERNEL:product_0_1x128x96x128]]
// CHECK: llvm.inline_asm has_side_effects asm_dialect = intel
// CHECK-SAME: ldtilecfg
// CHECK: scf.if
// CHECK: tdpbf16ps
// CHECK: llvm.x86.avx512bf16.dpbf16ps.512
// CHECK: arith.truncf
// CHECK: util.func public @f([[A:%.+]]: tensor<128x128xbf16>, [[B:%.+]]: tensor<2x64x96xf32>, [[V:%.+]]: tensor<96xf32>)
util.func public @f(%a: tensor<128x128xbf16>, %wide: tensor<2x64x96xf32>, %v: tensor<96xf32>) -> tensor<128x96xbf16> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x96xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x96xf32>) -> tensor<128x96xf32>
  %room = tensor.empty() : tensor<2x64x96xbf16>
  // CHECK: [[N:%.+]] = linalg.generic
  // CHECK: arith.truncf
  %narrow = linalg.generic {
      indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>],
      iterator_types = ["parallel", "parallel", "parallel"]
  } ins(%wide : tensor<2x64x96xf32>) outs(%room : tensor<2x64x96xbf16>) {
  ^bb0(%x: f32, %y: bf16):
    %r = arith.truncf %x : f32 to bf16
    linalg.yield %r : bf16
  } -> tensor<2x64x96xbf16>
  // CHECK: [[C:%.+]] = tensor.collapse_shape [[N]]
  // CHECK-SAME: into tensor<128x96xbf16>
  %again = linalg.generic {
      indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>],
      iterator_types = ["parallel", "parallel", "parallel"]
  } ins(%narrow : tensor<2x64x96xbf16>) outs(%wide : tensor<2x64x96xf32>) {
  ^bb0(%x: bf16, %y: f32):
    %r = arith.extf %x : bf16 to f32
    linalg.yield %r : f32
  } -> tensor<2x64x96xf32>
  %b = tensor.collapse_shape %again [[0, 1], [2]] : tensor<2x64x96xf32> into tensor<128x96xf32>
  %start = tensor.empty() : tensor<128x128xf32>
  %left = linalg.generic {indexing_maps = [#both, #both], iterator_types = ["parallel", "parallel"]}
      ins(%a : tensor<128x128xbf16>) outs(%start : tensor<128x128xf32>) {
  ^bb0(%x: bf16, %y: f32):
    %r = arith.extf %x : bf16 to f32
    linalg.yield %r : f32
  } -> tensor<128x128xf32>
  // CHECK: [[P:%.+]] = flow.dispatch @[[KERNEL]]::@[[KERNEL]]([[A]], [[C]], [[V]])
  // CHECK-SAME: (tensor<128x128xbf16>, tensor<128x96xbf16>, tensor<96xf32>) -> tensor<128x96xbf16>
  // CHECK-NEXT: util.return [[P]]
  %c = linalg.matmul ins(%left, %b : tensor<128x128xf32>, tensor<128x96xf32>)
      outs(%zeros : tensor<128x96xf32>) -> tensor<128x96xf32>
  %sum = linalg.generic {indexing_maps = [#both, #columns, #both], iterator_types = ["parallel", "parallel"]}
      ins(%c, %v : tensor<128x96xf32>, tensor<96xf32>) outs(%empty : tensor<128x96xf32>) {
  ^bb0(%x: f32, %y: f32, %z: f32):
    %r = arith.addf %x, %y : f32
    linalg.yield %r : f32
  } -> tensor<128x96xf32>
  %small = tensor.empty() : tensor<128x96xbf16>
  %rounded = linalg.generic {indexing_maps = [#both, #both], iterator_types = ["parallel", "parallel"]}
      ins(%sum : tensor<128x96xf32>) outs(%small : tensor<128x96xbf16>) {
  ^bb0(%x: f32, %y: bf16):
    %r = arith.truncf %x : f32 to bf16
    linalg.yield %r : bf16
  } -> tensor<128x96xbf16>
  util.return %rounded : tensor<128x96xbf16>
}
