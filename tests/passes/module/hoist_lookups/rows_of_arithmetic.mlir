// Rows that arithmetic computes get no barrier, because holding all of them before the loop would take memory.
// RUN: irongrad opt %s --pass hoist-lookups
// UNCHANGED

#row = affine_map<(d0) -> (d0)>

func.func @last(%x: tensor<5xf32>, %start: tensor<1xf32>) -> tensor<1xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 5 : index
  %one = arith.constant 1 : index
  %empty = tensor.empty() : tensor<5xf32>
  // CHECK: [[ROWS:%.+]] = linalg.generic
  %rows = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<5xf32>) outs(%empty : tensor<5xf32>) {
  ^bb0(%in: f32, %out: f32):
    %sum = arith.addf %in, %in : f32
    linalg.yield %sum : f32
  } -> tensor<5xf32>
  %end = scf.for %t = %first to %last step %one iter_args(%state = %start) -> tensor<1xf32> {
    // CHECK: tensor.extract_slice [[ROWS]]
    %row = tensor.extract_slice %rows[%t] [1] [1] : tensor<5xf32> to tensor<1xf32>
    scf.yield %row : tensor<1xf32>
  }
  return %end : tensor<1xf32>
}
