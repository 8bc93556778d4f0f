// A large result that is stored as state is fused with its reader, because it is written to memory anyway.
// RUN: irongrad opt %s --pass fuse-elementwise

#order = affine_map<(d0) -> (d0)>

util.global private mutable @m : tensor<65536xf32>
util.func public @f(%x: tensor<65536xf32>) -> tensor<65536xf32> {
  %empty = tensor.empty() : tensor<65536xf32>
  // CHECK: [[BOTH:%.+]]:2 = linalg.generic
  // CHECK: [[SUM:%.+]] = arith.addf
  // CHECK: math.tanh [[SUM]]
  // CHECK: util.global.store [[BOTH]]#{{.}}, @m
  // CHECK: util.return [[BOTH]]#{{.}}
  %a = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%x : tensor<65536xf32>) outs(%empty : tensor<65536xf32>) {
  ^bb0(%one: f32, %out: f32):
    %sum = arith.addf %one, %one : f32
    linalg.yield %sum : f32
  } -> tensor<65536xf32>
  %b = linalg.generic {indexing_maps = [#order, #order], iterator_types = ["parallel"]}
      ins(%a : tensor<65536xf32>) outs(%empty : tensor<65536xf32>) {
  ^bb0(%one: f32, %out: f32):
    %tanh = math.tanh %one : f32
    linalg.yield %tanh : f32
  } -> tensor<65536xf32>
  util.global.store %a, @m : tensor<65536xf32>
  util.return %b : tensor<65536xf32>
}
