// Barriers without our mark stay.
// RUN: irongrad opt %s --pass drop-barriers
// UNCHANGED

util.func public @step(%x: tensor<4xf32>) -> tensor<4xf32> {
  // CHECK: util.optimization_barrier
  %own = util.optimization_barrier %x : tensor<4xf32>
  util.return %own : tensor<4xf32>
}
