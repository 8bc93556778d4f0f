// Products over chunks of the summands, and the sum over the chunks, are one product. Padding with zeros adds nothing.
// RUN: irongrad opt %s --pass matmul-kernels

util.global private @__device_0 = #hal.device.target<"local", [#hal.executable.target<"llvm-cpu", "embedded-elf-x86_64",
    {cpu_features = "+avx2,+avx512f", target_triple = "x86_64-unknown-unknown-eabi-elf"}>]> : !hal.device
#turned = affine_map<(b, r, k) -> (r, b, k)>
#batch = affine_map<(b, r, c) -> (b, r, c)>
#sum = affine_map<(b, r, c) -> (r, c)>

// CHECK: util.func public @f([[A:%.+]]: tensor<64x5003xf32>, [[B:%.+]]: tensor<5003x768xf32>)
util.func public @f(%a: tensor<64x5003xf32>, %b: tensor<5003x768xf32>) -> tensor<64x768xf32> {
  %zero = arith.constant 0.0 : f32
  %left = tensor.pad %a low[0, 0] high[0, 117] {
  ^bb0(%i: index, %j: index):
    tensor.yield %zero : f32
  } : tensor<64x5003xf32> to tensor<64x5120xf32>
  %cut = tensor.expand_shape %left [[0], [1, 2]] output_shape [64, 20, 256] : tensor<64x5120xf32>
      into tensor<64x20x256xf32>
  %room = tensor.empty() : tensor<20x64x256xf32>
  %chunks = linalg.generic {indexing_maps = [#turned, #batch], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%cut : tensor<64x20x256xf32>) outs(%room : tensor<20x64x256xf32>) {
  ^bb0(%x: f32, %y: f32):
    linalg.yield %x : f32
  } -> tensor<20x64x256xf32>
  %right = tensor.pad %b low[0, 0] high[117, 0] {
  ^bb0(%i: index, %j: index):
    tensor.yield %zero : f32
  } : tensor<5003x768xf32> to tensor<5120x768xf32>
  %others = tensor.expand_shape %right [[0, 1], [2]] output_shape [20, 256, 768] : tensor<5120x768xf32>
      into tensor<20x256x768xf32>
  %empty = tensor.empty() : tensor<20x64x768xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<20x64x768xf32>) -> tensor<20x64x768xf32>
  %products = linalg.batch_matmul ins(%chunks, %others : tensor<20x64x256xf32>, tensor<20x256x768xf32>)
      outs(%zeros : tensor<20x64x768xf32>) -> tensor<20x64x768xf32>
  %nothing = tensor.empty() : tensor<64x768xf32>
  %start = linalg.fill ins(%zero : f32) outs(%nothing : tensor<64x768xf32>) -> tensor<64x768xf32>
  // CHECK: [[C:%.+]] = flow.dispatch @[[KERNEL:product_0_1x64x768x5003]]::@[[KERNEL]]([[A]], [[B]])
  // CHECK-NEXT: util.return [[C]]
  %sum = linalg.generic {indexing_maps = [#batch, #sum], iterator_types = ["reduction", "parallel", "parallel"]}
      ins(%products : tensor<20x64x768xf32>) outs(%start : tensor<64x768xf32>) {
  ^bb0(%x: f32, %y: f32):
    %z = arith.addf %x, %y : f32
    linalg.yield %z : f32
  } -> tensor<64x768xf32>
  util.return %sum : tensor<64x768xf32>
}
