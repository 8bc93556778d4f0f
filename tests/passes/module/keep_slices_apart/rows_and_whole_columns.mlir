// A slice whose last dimension has no gaps stays in the kernel, and so does a slice that no kernel looks elements up in.
// RUN: irongrad opt %s --pass keep-slices-apart
// UNCHANGED

#order = affine_map<(d0) -> (d0)>

util.func public @f(%x: tensor<8x4xf32>, %y: tensor<8x1xf32>, %places: tensor<3xindex>)
    -> (tensor<3xf32>, tensor<8xf32>) {
  %row = tensor.extract_slice %x[1, 0] [1, 4] [1, 1] : tensor<8x4xf32> to tensor<4xf32>
  %only = tensor.extract_slice %y[0, 0] [8, 1] [1, 1] : tensor<8x1xf32> to tensor<8xf32>
  %column = tensor.extract_slice %x[0, 1] [8, 1] [1, 1] : tensor<8x4xf32> to tensor<8xf32>
  %empty = tensor.empty() : tensor<3xf32>
  %found = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%places : tensor<3xindex>) outs(%empty : tensor<3xf32>) {
  ^bb0(%place: index, %out: f32):
    // CHECK: tensor.extract
    %first = tensor.extract %row[%place] : tensor<4xf32>
    %second = tensor.extract %only[%place] : tensor<8xf32>
    %sum = arith.addf %first, %second : f32
    linalg.yield %sum : f32
  } -> tensor<3xf32>
  util.return %found, %column : tensor<3xf32>, tensor<8xf32>
}
