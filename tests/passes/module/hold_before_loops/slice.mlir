// A slice in a loop of what is computed before it.
// RUN: irongrad opt %s --pass hold-before-loops
#map = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
// CHECK: %[[VALUE:.*]] = linalg.generic
// CHECK: %[[HELD:.*]] = util.optimization_barrier {irongrad.held} %[[VALUE]]
// CHECK: %[[TIED:.*]] = flow.tensor.tie_shape %[[HELD]]
// CHECK: scf.for
// CHECK: tensor.extract_slice %[[TIED]]
util.func public @f(%x: tensor<?x?x44xf32>, %h: tensor<?x44xf32>, %t: index, %b: index) -> tensor<?x44xf32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %e = tensor.empty(%t, %b) : tensor<?x?x44xf32>
  %v = linalg.generic {indexing_maps = [#map, #map], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x : tensor<?x?x44xf32>) outs(%e : tensor<?x?x44xf32>) {
  ^bb0(%in: f32, %out: f32):
    %n = math.tanh %in : f32
    linalg.yield %n : f32
  } -> tensor<?x?x44xf32>
  %r = scf.for %i = %c0 to %t step %c1 iter_args(%s = %h) -> (tensor<?x44xf32>) {
    %p = tensor.extract_slice %v[%i, 0, 0] [1, %b, 44] [1, 1, 1] : tensor<?x?x44xf32> to tensor<?x44xf32>
    scf.yield %p : tensor<?x44xf32>
  }
  util.return %r : tensor<?x44xf32>
}
