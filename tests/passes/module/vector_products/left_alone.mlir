// Left alone: a product of two matrices, a small one, and one whose many summands are no neighbours.
// RUN: irongrad opt %s --pass vector-products
// UNCHANGED
// CHECK-NOT: linalg.generic

util.func public @two_matrices(%x: tensor<64x256xf32>, %y: tensor<256x64xf32>) -> tensor<64x64xf32> {
  %zero = arith.constant 0.000000e+00 : f32
  %room = tensor.empty() : tensor<64x64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%room : tensor<64x64xf32>) -> tensor<64x64xf32>
  %r = linalg.matmul ins(%x, %y : tensor<64x256xf32>, tensor<256x64xf32>) outs(%zeros : tensor<64x64xf32>) -> tensor<64x64xf32>
  util.return %r : tensor<64x64xf32>
}
util.func public @small(%x: tensor<64x256xf32>, %y: tensor<256x1xf32>) -> tensor<64x1xf32> {
  %zero = arith.constant 0.000000e+00 : f32
  %room = tensor.empty() : tensor<64x1xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%room : tensor<64x1xf32>) -> tensor<64x1xf32>
  %r = linalg.matmul ins(%x, %y : tensor<64x256xf32>, tensor<256x1xf32>) outs(%zeros : tensor<64x1xf32>) -> tensor<64x1xf32>
  util.return %r : tensor<64x1xf32>
}
util.func public @many_apart(%x: tensor<1x1024xf32>, %y: tensor<1024x1024xf32>) -> tensor<1x1024xf32> {
  %zero = arith.constant 0.000000e+00 : f32
  %room = tensor.empty() : tensor<1x1024xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%room : tensor<1x1024xf32>) -> tensor<1x1024xf32>
  %r = linalg.matmul ins(%x, %y : tensor<1x1024xf32>, tensor<1024x1024xf32>) outs(%zeros : tensor<1x1024xf32>) -> tensor<1x1024xf32>
  util.return %r : tensor<1x1024xf32>
}
