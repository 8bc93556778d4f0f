// A small part of widened numbers is held; a large one is not, nor a part of numbers that are not widened.
// RUN: irongrad opt %s --pass keep-slices-apart

#order = affine_map<(i) -> (i)>

// CHECK-LABEL: @small
util.func public @small(%x: tensor<256xbf16>) -> tensor<1xf32> {
  %empty = tensor.empty() : tensor<256xf32>
  %wide = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%x : tensor<256xbf16>) outs(%empty : tensor<256xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %w = arith.extf %in : bf16 to f32
    linalg.yield %w : f32
  } -> tensor<256xf32>
  // CHECK: %[[PART:.*]] = tensor.extract_slice
  // CHECK: %[[HELD:.*]] = util.optimization_barrier {irongrad.held} %[[PART]]
  // CHECK: util.return %[[HELD]]
  %part = tensor.extract_slice %wide[0] [1] [1] : tensor<256xf32> to tensor<1xf32>
  util.return %part : tensor<1xf32>
}

// CHECK-LABEL: @large
// CHECK-NOT: util.optimization_barrier
util.func public @large(%x: tensor<256xbf16>) -> tensor<64xf32> {
  %empty = tensor.empty() : tensor<256xf32>
  %wide = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%x : tensor<256xbf16>) outs(%empty : tensor<256xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %w = arith.extf %in : bf16 to f32
    linalg.yield %w : f32
  } -> tensor<256xf32>
  %part = tensor.extract_slice %wide[0] [64] [1] : tensor<256xf32> to tensor<64xf32>
  util.return %part : tensor<64xf32>
}

// CHECK-LABEL: @as_wide
// CHECK-NOT: util.optimization_barrier
util.func public @as_wide(%x: tensor<256xf32>) -> tensor<1xf32> {
  %empty = tensor.empty() : tensor<256xf32>
  %twice = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%x : tensor<256xf32>) outs(%empty : tensor<256xf32>) {
  ^bb0(%in: f32, %out: f32):
    %w = arith.addf %in, %in : f32
    linalg.yield %w : f32
  } -> tensor<256xf32>
  %part = tensor.extract_slice %twice[0] [1] [1] : tensor<256xf32> to tensor<1xf32>
  util.return %part : tensor<1xf32>
}
