// A product of one row and a transposed matrix becomes a sum over the matrix as it is stored, and so do any number of
// rows times one column.
// RUN: irongrad opt %s --pass vector-products

#stored = affine_map<(b, k, c) -> (k, b, c)>
#whole = affine_map<(b, k, c) -> (b, k, c)>

// CHECK-DAG: #[[ROW:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d1, d3)>
// CHECK-DAG: #[[STORED:.*]] = affine_map<(d0, d1, d2, d3) -> (d3, d0, d2)>
// CHECK-DAG: #[[SCALAR:.*]] = affine_map<(d0, d1, d2, d3) -> ()>
// CHECK-DAG: #[[SUMS:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d1, d2)>

// CHECK-LABEL: @row
util.func public @row(%v: tensor<2048x1x8xf32>, %x: tensor<8x2048x128xf32>) -> tensor<2048x1x128xf32> {
  // CHECK: %[[ONE:.*]] = util.optimization_barrier {irongrad.held} %{{.*}} : tensor<f32>
  // CHECK: linalg.generic {indexing_maps = [#[[ROW]], #[[STORED]], #[[SCALAR]], #[[SUMS]]]
  // CHECK-SAME: ins(%arg0, %arg1, %[[ONE]]
  // CHECK-NOT: linalg.batch_matmul
  %empty = tensor.empty() : tensor<2048x8x128xf32>
  %t = linalg.generic {indexing_maps = [#stored, #whole], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<8x2048x128xf32>) outs(%empty : tensor<2048x8x128xf32>) {
  ^bb0(%a: f32, %out: f32):
    linalg.yield %a : f32
  } -> tensor<2048x8x128xf32>
  %zero = arith.constant 0.0 : f32
  %room = tensor.empty() : tensor<2048x1x128xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%room : tensor<2048x1x128xf32>) -> tensor<2048x1x128xf32>
  %r = linalg.batch_matmul ins(%v, %t : tensor<2048x1x8xf32>, tensor<2048x8x128xf32>)
      outs(%zeros : tensor<2048x1x128xf32>) -> tensor<2048x1x128xf32>
  util.return %r : tensor<2048x1x128xf32>
}

// CHECK-LABEL: @any_number_of_rows
util.func public @any_number_of_rows(%x: tensor<?x1024xf32>, %y: tensor<1024x1xf32>, %rows: index) -> tensor<?x1xf32> {
  // CHECK: linalg.generic
  // CHECK-SAME: ins(%arg0, %arg1,
  // CHECK-NOT: linalg.matmul
  %zero = arith.constant 0.0 : f32
  %room = tensor.empty(%rows) : tensor<?x1xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%room : tensor<?x1xf32>) -> tensor<?x1xf32>
  %r = linalg.matmul ins(%x, %y : tensor<?x1024xf32>, tensor<1024x1xf32>) outs(%zeros : tensor<?x1xf32>)
      -> tensor<?x1xf32>
  util.return %r : tensor<?x1xf32>
}
