// Computed indices and updates are held if they are large or of any size; what the function is given is not.
// RUN: irongrad opt %s --pass keep-scatters-apart

#order = affine_map<(i, j) -> (i, j)>

// CHECK-LABEL: @any_size
util.func public @any_size(%updates: tensor<?xf32>, %places: tensor<?x1xi64>, %into: tensor<?xf32>, %n: index)
    -> (tensor<?xf32>, tensor<?xf32>) {
  %empty = tensor.empty(%n) : tensor<?x1xi64>
  // CHECK: %[[INDICES:.*]] = linalg.generic
  %indices = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel", "parallel"]}
      ins(%places : tensor<?x1xi64>) outs(%empty : tensor<?x1xi64>) {
  ^bb0(%in: i64, %out: i64):
    %s = arith.addi %in, %in : i64
    linalg.yield %s : i64
  } -> tensor<?x1xi64>
  // CHECK: util.optimization_barrier {irongrad.held} %[[INDICES]]
  // CHECK: %[[HELD:.*]] = flow.tensor.tie_shape
  // CHECK: iree_linalg_ext.scatter
  // CHECK-SAME: ins(%{{.*}}, %[[HELD]]
  %first = iree_linalg_ext.scatter dimension_map = [0] unique_indices(false)
      ins(%updates, %indices : tensor<?xf32>, tensor<?x1xi64>) outs(%into : tensor<?xf32>) {
  ^bb0(%new: f32, %old: f32):
    %s = arith.addf %new, %old : f32
    iree_linalg_ext.yield %s : f32
  } -> tensor<?xf32>
  // CHECK-NOT: util.optimization_barrier
  %second = iree_linalg_ext.scatter dimension_map = [0] unique_indices(false)
      ins(%updates, %places : tensor<?xf32>, tensor<?x1xi64>) outs(%into : tensor<?xf32>) {
  ^bb0(%new: f32, %old: f32):
    %s = arith.addf %new, %old : f32
    iree_linalg_ext.yield %s : f32
  } -> tensor<?xf32>
  util.return %first, %second : tensor<?xf32>, tensor<?xf32>
}

// CHECK-LABEL: @fixed_size
// CHECK-NOT: util.optimization_barrier
util.func public @fixed_size(%updates: tensor<4xf32>, %places: tensor<4x1xi64>, %into: tensor<?xf32>) -> tensor<?xf32> {
  %empty = tensor.empty() : tensor<4x1xi64>
  %indices = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel", "parallel"]}
      ins(%places : tensor<4x1xi64>) outs(%empty : tensor<4x1xi64>) {
  ^bb0(%in: i64, %out: i64):
    %s = arith.addi %in, %in : i64
    linalg.yield %s : i64
  } -> tensor<4x1xi64>
  %made = iree_linalg_ext.scatter dimension_map = [0] unique_indices(false)
      ins(%updates, %indices : tensor<4xf32>, tensor<4x1xi64>) outs(%into : tensor<?xf32>) {
  ^bb0(%new: f32, %old: f32):
    %s = arith.addf %new, %old : f32
    iree_linalg_ext.yield %s : f32
  } -> tensor<?xf32>
  util.return %made : tensor<?xf32>
}

// CHECK-LABEL: @widened_updates
util.func public @widened_updates(%halves: tensor<128x64xbf16>, %places: tensor<128x1xi64>, %into: tensor<16x64xf32>)
    -> tensor<16x64xf32> {
  %empty = tensor.empty() : tensor<128x64xf32>
  // CHECK: %[[UPDATES:.*]] = linalg.generic
  %updates = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel", "parallel"]}
      ins(%halves : tensor<128x64xbf16>) outs(%empty : tensor<128x64xf32>) {
  ^bb0(%in: bf16, %out: f32):
    %w = arith.extf %in : bf16 to f32
    linalg.yield %w : f32
  } -> tensor<128x64xf32>
  // CHECK: %[[HELD:.*]] = util.optimization_barrier {irongrad.held} %[[UPDATES]]
  // CHECK: iree_linalg_ext.scatter
  // CHECK-SAME: ins(%[[HELD]]
  %made = iree_linalg_ext.scatter dimension_map = [0] unique_indices(false)
      ins(%updates, %places : tensor<128x64xf32>, tensor<128x1xi64>) outs(%into : tensor<16x64xf32>) {
  ^bb0(%new: f32, %old: f32):
    %s = arith.addf %new, %old : f32
    iree_linalg_ext.yield %s : f32
  } -> tensor<16x64xf32>
  util.return %made : tensor<16x64xf32>
}
