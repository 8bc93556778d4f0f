// A contraction whose batch dimension comes second is held; one whose batch dimension comes first is not.
// RUN: irongrad opt %s --pass keep-contractions-apart

#all = affine_map<(i, j, k) -> (i, j, k)>
#last_two = affine_map<(i, j, k) -> (j, k)>
#outer_two = affine_map<(i, j, k) -> (i, k)>
#sums = affine_map<(i, j, k) -> (i, j)>

// CHECK-LABEL: @second
util.func public @second(%x: tensor<8x4x16xf32>, %w: tensor<4x16xf32>, %s: tensor<8x4xf32>) -> tensor<8x4x16xf32> {
  // CHECK: %[[SUM:.*]] = linalg.generic
  %sum = linalg.generic {indexing_maps = [#all, #last_two, #sums],
                         iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<8x4x16xf32>, tensor<4x16xf32>) outs(%s : tensor<8x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %m = arith.mulf %a, %b : f32
    %n = arith.addf %m, %out : f32
    linalg.yield %n : f32
  } -> tensor<8x4xf32>
  // CHECK: %[[HELD:.*]] = util.optimization_barrier {irongrad.held} %[[SUM]]
  %empty = tensor.empty() : tensor<8x4x16xf32>
  // CHECK: linalg.generic
  // CHECK-SAME: ins(%{{.*}}, %[[HELD]]
  %r = linalg.generic {indexing_maps = [#all, #sums, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x, %sum : tensor<8x4x16xf32>, tensor<8x4xf32>) outs(%empty : tensor<8x4x16xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %m = arith.mulf %a, %b : f32
    linalg.yield %m : f32
  } -> tensor<8x4x16xf32>
  util.return %r : tensor<8x4x16xf32>
}

// CHECK-LABEL: @first
// CHECK-NOT: util.optimization_barrier
util.func public @first(%x: tensor<8x4x16xf32>, %w: tensor<8x16xf32>, %s: tensor<8x4xf32>) -> tensor<8x4x16xf32> {
  %sum = linalg.generic {indexing_maps = [#all, #outer_two, #sums],
                         iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<8x4x16xf32>, tensor<8x16xf32>) outs(%s : tensor<8x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %m = arith.mulf %a, %b : f32
    %n = arith.addf %m, %out : f32
    linalg.yield %n : f32
  } -> tensor<8x4xf32>
  %empty = tensor.empty() : tensor<8x4x16xf32>
  %r = linalg.generic {indexing_maps = [#all, #sums, #all], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x, %sum : tensor<8x4x16xf32>, tensor<8x4xf32>) outs(%empty : tensor<8x4x16xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %m = arith.mulf %a, %b : f32
    linalg.yield %m : f32
  } -> tensor<8x4x16xf32>
  util.return %r : tensor<8x4x16xf32>
}

// CHECK-LABEL: @read_by_nobody
// CHECK-NOT: util.optimization_barrier
util.func public @read_by_nobody(%x: tensor<8x4x16xf32>, %w: tensor<4x16xf32>, %s: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %sum = linalg.generic {indexing_maps = [#all, #last_two, #sums],
                         iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<8x4x16xf32>, tensor<4x16xf32>) outs(%s : tensor<8x4xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %m = arith.mulf %a, %b : f32
    %n = arith.addf %m, %out : f32
    linalg.yield %n : f32
  } -> tensor<8x4xf32>
  util.return %sum : tensor<8x4xf32>
}
