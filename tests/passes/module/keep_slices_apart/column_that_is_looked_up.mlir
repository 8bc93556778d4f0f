// A column in which a kernel looks elements up is copied first. Another reader still reads the slice.
// RUN: irongrad opt %s --pass keep-slices-apart

#order = affine_map<(d0) -> (d0)>

util.func public @f(%x: tensor<8x4xf32>, %places: tensor<3xindex>) -> (tensor<3xf32>, tensor<8xf32>) {
  // CHECK: [[SLICE:%.+]] = tensor.extract_slice
  // CHECK-NEXT: [[HELD:%.+]] = util.optimization_barrier {irongrad.held} [[SLICE]] : tensor<8xf32>
  %slice = tensor.extract_slice %x[0, 1] [8, 1] [1, 1] : tensor<8x4xf32> to tensor<8xf32>
  %empty = tensor.empty() : tensor<3xf32>
  %found = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%places : tensor<3xindex>) outs(%empty : tensor<3xf32>) {
  ^bb0(%place: index, %out: f32):
    // CHECK: tensor.extract [[HELD]]
    %element = tensor.extract %slice[%place] : tensor<8xf32>
    linalg.yield %element : f32
  } -> tensor<3xf32>
  // CHECK: util.return %{{.+}}, [[SLICE]]
  util.return %found, %slice : tensor<3xf32>, tensor<8xf32>
}
