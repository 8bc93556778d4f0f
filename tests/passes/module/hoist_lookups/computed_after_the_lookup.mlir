// A loop reads rows through elementwise operations and reshapes. A barrier holds the rows before the loop.
// RUN: irongrad opt %s --pass hoist-lookups

#row = affine_map<(d0) -> (d0)>

func.func @last(%table: tensor<7xf32>, %indices: tensor<5xi64>, %start: tensor<1xf32>) -> tensor<1xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 5 : index
  %one = arith.constant 1 : index
  %empty = tensor.empty() : tensor<5xf32>
  %found = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%indices : tensor<5xi64>) outs(%empty : tensor<5xf32>) {
  ^bb0(%at: i64, %out: f32):
    %place = arith.index_cast %at : i64 to index
    %element = tensor.extract %table[%place] : tensor<7xf32>
    linalg.yield %element : f32
  } -> tensor<5xf32>
  %doubled = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%found : tensor<5xf32>) outs(%empty : tensor<5xf32>) {
  ^bb0(%in: f32, %out: f32):
    %sum = arith.addf %in, %in : f32
    linalg.yield %sum : f32
  } -> tensor<5xf32>
  // CHECK: [[ROWS:%.+]] = tensor.expand_shape
  %rows = tensor.expand_shape %doubled [[0, 1]] output_shape [5, 1] : tensor<5xf32> into tensor<5x1xf32>
  // CHECK-NEXT: [[HELD:%.+]] = util.optimization_barrier {irongrad.held} [[ROWS]] : tensor<5x1xf32>
  // CHECK-NEXT: scf.for
  %end = scf.for %t = %first to %last step %one iter_args(%state = %start) -> tensor<1xf32> {
    // CHECK-NEXT: tensor.extract_slice [[HELD]]
    %row = tensor.extract_slice %rows[%t, 0] [1, 1] [1, 1] : tensor<5x1xf32> to tensor<1xf32>
    scf.yield %row : tensor<1xf32>
  }
  return %end : tensor<1xf32>
}
