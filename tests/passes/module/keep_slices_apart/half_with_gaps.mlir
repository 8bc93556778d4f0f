// A slice of bfloat16 with gaps between its elements is held before a product that reads it; float32 and rows are not.
// RUN: irongrad opt %s --pass keep-slices-apart

// CHECK-LABEL: @taps
util.func public @taps(%a: tensor<16x96xbf16>, %w: tensor<96x96x3x3xbf16>, %b: tensor<16x96xf32>,
    %v: tensor<96x96x3x3xf32>, %zeros: tensor<16x96xf32>) -> (tensor<16x96xf32>, tensor<16x96xf32>, tensor<16x96xf32>) {
  // CHECK: [[TAP:%.+]] = tensor.extract_slice %{{.+}}[0, 0, 1, 1]
  // CHECK: [[HELD:%.+]] = util.optimization_barrier {irongrad.held} [[TAP]]
  %tap = tensor.extract_slice %w[0, 0, 1, 1] [96, 96, 1, 1] [1, 1, 1, 1] : tensor<96x96x3x3xbf16> to tensor<96x96xbf16>
  // CHECK: linalg.matmul ins(%{{.+}}, [[HELD]] :
  %half = linalg.matmul ins(%a, %tap : tensor<16x96xbf16>, tensor<96x96xbf16>) outs(%zeros : tensor<16x96xf32>)
      -> tensor<16x96xf32>
  // CHECK-NOT: util.optimization_barrier
  %wide = tensor.extract_slice %v[0, 0, 1, 1] [96, 96, 1, 1] [1, 1, 1, 1] : tensor<96x96x3x3xf32> to tensor<96x96xf32>
  %float = linalg.matmul ins(%b, %wide : tensor<16x96xf32>, tensor<96x96xf32>) outs(%zeros : tensor<16x96xf32>)
      -> tensor<16x96xf32>
  %flat = tensor.collapse_shape %w [[0], [1, 2, 3]] : tensor<96x96x3x3xbf16> into tensor<96x864xbf16>
  %rows = tensor.extract_slice %flat[0, 96] [96, 96] [1, 1] : tensor<96x864xbf16> to tensor<96x96xbf16>
  %of_rows = linalg.matmul ins(%a, %rows : tensor<16x96xbf16>, tensor<96x96xbf16>) outs(%zeros : tensor<16x96xf32>)
      -> tensor<16x96xf32>
  util.return %half, %float, %of_rows : tensor<16x96xf32>, tensor<16x96xf32>, tensor<16x96xf32>
}
