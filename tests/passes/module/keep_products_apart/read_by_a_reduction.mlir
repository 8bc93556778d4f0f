// A product gets no kernel of its own if its reader is a reduction, however many other values that reads.
// RUN: irongrad opt %s --pass keep-products-apart
// UNCHANGED

#order = affine_map<(d0, d1) -> (d0, d1)>
#row = affine_map<(d0, d1) -> (d0)>

util.func public @f(%x: tensor<8x8xf32>, %a: tensor<8x8xf32>, %b: tensor<8x8xf32>, %zeros: tensor<8x8xf32>,
    %none: tensor<8xf32>) -> tensor<8xf32> {
  // CHECK: [[P:%.+]] = linalg.matmul
  %p = linalg.matmul ins(%x, %x : tensor<8x8xf32>, tensor<8x8xf32>) outs(%zeros : tensor<8x8xf32>) -> tensor<8x8xf32>
  // CHECK: linalg.generic {{.+}} ins([[P]], %{{.+}} : {{.+}})
  %r = linalg.generic {indexing_maps = [#order, #order, #order, #order, #row],
      iterator_types = ["parallel", "reduction"]}
      ins(%p, %x, %a, %b : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>)
      outs(%none : tensor<8xf32>) {
  ^bb0(%in: f32, %s: f32, %t: f32, %u: f32, %out: f32):
    %first = arith.mulf %in, %s : f32
    %second = arith.mulf %t, %u : f32
    %product = arith.mulf %first, %second : f32
    %sum = arith.addf %product, %out : f32
    linalg.yield %sum : f32
  } -> tensor<8xf32>
  util.return %r : tensor<8xf32>
}
