// The pass refuses integer tensors of varying sizes, because it cannot yet separate their words.
// RUN: not irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

// CHECK: error: f takes or gives int64 tensors of varying sizes
func.func private @graph.f(%x: tensor<?xi64>) -> tensor<?xi64> {
  return %x : tensor<?xi64>
}
