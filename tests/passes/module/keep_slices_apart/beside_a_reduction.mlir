// A slice of a tensor of any size beside the result of a reduction is held; one of a fixed size is not, nor one alone.
// RUN: irongrad opt %s --pass keep-slices-apart

#rows = affine_map<(t, b) -> (t, b)>
#row = affine_map<(t, b) -> (b)>
#order = affine_map<(b) -> (b)>

// CHECK-LABEL: @any_size
util.func public @any_size(%x: tensor<?x?xf32>, %b: index) -> (tensor<?xf32>, tensor<?xf32>) {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%b) : tensor<?xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%empty : tensor<?xf32>) -> tensor<?xf32>
  // CHECK: %[[SLICE:.*]] = tensor.extract_slice
  // CHECK: util.optimization_barrier {irongrad.held} %[[SLICE]]
  // CHECK: %[[HELD:.*]] = flow.tensor.tie_shape
  %slice = tensor.extract_slice %x[1, 0] [1, %b] [1, 1] : tensor<?x?xf32> to tensor<?xf32>
  %sum = linalg.generic {indexing_maps = [#rows, #row], iterator_types = ["reduction", "parallel"]}
      ins(%x : tensor<?x?xf32>) outs(%filled : tensor<?xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  %half = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%sum : tensor<?xf32>) outs(%empty : tensor<?xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.negf %in : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  // CHECK: ins(%[[HELD]],
  %beside = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel"]}
      ins(%slice, %half : tensor<?xf32>, tensor<?xf32>) outs(%empty : tensor<?xf32>) {
  ^bb0(%in: f32, %other: f32, %out: f32):
    %s = arith.addf %in, %other : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  // CHECK: ins(%[[SLICE]] :
  %alone = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%slice : tensor<?xf32>) outs(%empty : tensor<?xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.negf %in : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  util.return %beside, %alone : tensor<?xf32>, tensor<?xf32>
}

// CHECK-LABEL: @fixed_size
// CHECK-NOT: optimization_barrier
util.func public @fixed_size(%x: tensor<3x4xf32>) -> tensor<4xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%empty : tensor<4xf32>) -> tensor<4xf32>
  %slice = tensor.extract_slice %x[1, 0] [1, 4] [1, 1] : tensor<3x4xf32> to tensor<4xf32>
  %sum = linalg.generic {indexing_maps = [#rows, #row], iterator_types = ["reduction", "parallel"]}
      ins(%x : tensor<3x4xf32>) outs(%filled : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %beside = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel"]}
      ins(%slice, %sum : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %other: f32, %out: f32):
    %s = arith.addf %in, %other : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  util.return %beside : tensor<4xf32>
}

// CHECK-LABEL: @any_place
util.func public @any_place(%x: tensor<?x4xf32>, %last: index) -> tensor<4xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%empty : tensor<4xf32>) -> tensor<4xf32>
  // CHECK: %[[SLICE:.*]] = tensor.extract_slice
  // CHECK: util.optimization_barrier {irongrad.held} %[[SLICE]]
  %slice = tensor.extract_slice %x[%last, 0] [1, 4] [1, 1] : tensor<?x4xf32> to tensor<4xf32>
  %sum = linalg.generic {indexing_maps = [#rows, #row], iterator_types = ["reduction", "parallel"]}
      ins(%x : tensor<?x4xf32>) outs(%filled : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  %beside = linalg.generic {indexing_maps = [#order, #order, #order], iterator_types = ["parallel"]}
      ins(%slice, %sum : tensor<4xf32>, tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %other: f32, %out: f32):
    %s = arith.addf %in, %other : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  util.return %beside : tensor<4xf32>
}
