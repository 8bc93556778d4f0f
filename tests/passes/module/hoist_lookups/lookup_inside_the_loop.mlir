// A lookup inside the loop stays there.
// RUN: irongrad opt %s --pass hoist-lookups
// UNCHANGED

#row = affine_map<(d0) -> (d0)>

func.func @last(%table: tensor<7xf32>, %indices: tensor<5xi64>, %start: tensor<1xf32>) -> tensor<1xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 5 : index
  %one = arith.constant 1 : index
  %empty = tensor.empty() : tensor<5xf32>
  // CHECK: scf.for
  %end = scf.for %t = %first to %last step %one iter_args(%state = %start) -> tensor<1xf32> {
    // CHECK: [[ROWS:%.+]] = linalg.generic
    %rows = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
        ins(%indices : tensor<5xi64>) outs(%empty : tensor<5xf32>) {
    ^bb0(%at: i64, %out: f32):
      %place = arith.index_cast %at : i64 to index
      %element = tensor.extract %table[%place] : tensor<7xf32>
      linalg.yield %element : f32
    } -> tensor<5xf32>
    // CHECK: tensor.extract_slice [[ROWS]]
    %row = tensor.extract_slice %rows[%t] [1] [1] : tensor<5xf32> to tensor<1xf32>
    scf.yield %row : tensor<1xf32>
  }
  return %end : tensor<1xf32>
}
