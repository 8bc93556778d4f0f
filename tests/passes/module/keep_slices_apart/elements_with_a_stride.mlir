// Every second element is a slice with gaps, also behind a reshape.
// RUN: irongrad opt %s --pass keep-slices-apart

#order = affine_map<(d0) -> (d0)>

util.func public @f(%x: tensor<8xf32>, %places: tensor<3xindex>) -> tensor<3xf32> {
  %slice = tensor.extract_slice %x[0] [4] [2] : tensor<8xf32> to tensor<4xf32>
  // CHECK: [[SQUARE:%.+]] = tensor.expand_shape
  // CHECK-NEXT: [[HELD:%.+]] = util.optimization_barrier {irongrad.held} [[SQUARE]] : tensor<2x2xf32>
  %square = tensor.expand_shape %slice [[0, 1]] output_shape [2, 2] : tensor<4xf32> into tensor<2x2xf32>
  %empty = tensor.empty() : tensor<3xf32>
  %found = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%places : tensor<3xindex>) outs(%empty : tensor<3xf32>) {
  ^bb0(%place: index, %out: f32):
    // CHECK: tensor.extract [[HELD]]
    %element = tensor.extract %square[%place, %place] : tensor<2x2xf32>
    linalg.yield %element : f32
  } -> tensor<3xf32>
  util.return %found : tensor<3xf32>
}
