// A sum that an operation reads along its rows and along its columns is held, also behind an elementwise operation.
// RUN: irongrad opt %s --pass keep-reductions-apart

#all = affine_map<(i, j) -> (i, j)>
#row = affine_map<(i, j) -> (i)>
#column = affine_map<(i, j) -> (j)>
#order = affine_map<(i) -> (i)>

// CHECK-LABEL: @itself
util.func public @itself(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%empty : tensor<4xf32>) -> tensor<4xf32>
  // CHECK: %[[SUM:.*]] = linalg.generic
  %sum = linalg.generic {indexing_maps = [#all, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<4x4xf32>) outs(%filled : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<4xf32>
  // CHECK: %[[HELD:.*]] = util.optimization_barrier {irongrad.held} %[[SUM]]
  // CHECK: linalg.generic
  // CHECK-SAME: ins(%[[HELD]], %[[HELD]]
  %wide = tensor.empty() : tensor<4x4xf32>
  %product = linalg.generic {indexing_maps = [#row, #column, #all], iterator_types = ["parallel", "parallel"]}
      ins(%sum, %sum : tensor<4xf32>, tensor<4xf32>) outs(%wide : tensor<4x4xf32>) {
  ^bb0(%left: f32, %right: f32, %out: f32):
    %s = arith.mulf %left, %right : f32
    linalg.yield %s : f32
  } -> tensor<4x4xf32>
  util.return %product : tensor<4x4xf32>
}

// CHECK-LABEL: @through_an_operation_and_a_reshape
util.func public @through_an_operation_and_a_reshape(%x: tensor<?x?xf32>, %n: index) -> tensor<?x?xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%n) : tensor<?xf32>
  %filled = linalg.fill ins(%zero : f32) outs(%empty : tensor<?xf32>) -> tensor<?xf32>
  // CHECK: %[[SUM:.*]] = linalg.generic
  %sum = linalg.generic {indexing_maps = [#all, #row], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<?x?xf32>) outs(%filled : tensor<?xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = arith.addf %in, %out : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  // CHECK: util.optimization_barrier {irongrad.held} %[[SUM]]
  %root = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%sum : tensor<?xf32>) outs(%empty : tensor<?xf32>) {
  ^bb0(%in: f32, %out: f32):
    %s = math.rsqrt %in : f32
    linalg.yield %s : f32
  } -> tensor<?xf32>
  %turned = tensor.expand_shape %root [[0, 1]] output_shape [1, %n] : tensor<?xf32> into tensor<1x?xf32>
  %wide = tensor.empty(%n, %n) : tensor<?x?xf32>
  %scaled = linalg.generic {
      indexing_maps = [#all, #row, affine_map<(i, j) -> (0, j)>, #all], iterator_types = ["parallel", "parallel"]}
      ins(%x, %sum, %turned : tensor<?x?xf32>, tensor<?xf32>, tensor<1x?xf32>) outs(%wide : tensor<?x?xf32>) {
  ^bb0(%in: f32, %left: f32, %right: f32, %out: f32):
    %s = arith.divf %in, %left : f32
    %t = arith.mulf %s, %right : f32
    linalg.yield %t : f32
  } -> tensor<?x?xf32>
  util.return %scaled : tensor<?x?xf32>
}
