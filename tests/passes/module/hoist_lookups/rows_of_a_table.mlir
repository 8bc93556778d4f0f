// A loop reads rows of a lookup that ran before it. A barrier holds the rows before the loop.
// RUN: irongrad opt %s --pass hoist-lookups

#order = affine_map<(d0, d1) -> (d0, d1)>
#index = affine_map<(d0, d1) -> (d0)>

func.func @sum(%table: tensor<7x4xf32>, %indices: tensor<5xi64>, %start: tensor<1x4xf32>) -> tensor<1x4xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 5 : index
  %one = arith.constant 1 : index
  %empty = tensor.empty() : tensor<5x4xf32>
  // CHECK: [[ROWS:%.+]] = linalg.generic
  %rows = linalg.generic {indexing_maps = [#index, #order], iterator_types = ["parallel", "parallel"]}
      ins(%indices : tensor<5xi64>) outs(%empty : tensor<5x4xf32>) {
  ^bb0(%at: i64, %out: f32):
    %row = arith.index_cast %at : i64 to index
    %column = linalg.index 1 : index
    %element = tensor.extract %table[%row, %column] : tensor<7x4xf32>
    linalg.yield %element : f32
  } -> tensor<5x4xf32>
  // CHECK: [[HELD:%.+]] = util.optimization_barrier {irongrad.held} [[ROWS]] : tensor<5x4xf32>
  // CHECK-NEXT: scf.for [[T:%[^ ]+]] =
  %end = scf.for %t = %first to %last step %one iter_args(%state = %start) -> tensor<1x4xf32> {
    // CHECK-NEXT: tensor.extract_slice [[HELD]]{{\[}}[[T]], 0]
    %row = tensor.extract_slice %rows[%t, 0] [1, 4] [1, 1] : tensor<5x4xf32> to tensor<1x4xf32>
    %next = arith.addf %state, %row : tensor<1x4xf32>
    scf.yield %next : tensor<1x4xf32>
  }
  return %end : tensor<1x4xf32>
}
