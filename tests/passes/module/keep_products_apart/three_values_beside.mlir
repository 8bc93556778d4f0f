// A product gets a kernel of its own if its reader reads three other values of its size.
// RUN: irongrad opt %s --pass keep-products-apart

#order = affine_map<(d0, d1) -> (d0, d1)>

util.func public @f(%x: tensor<8x8xf32>, %a: tensor<8x8xf32>, %b: tensor<8x8xf32>, %zeros: tensor<8x8xf32>)
    -> tensor<8x8xf32> {
  // CHECK: [[P:%.+]] = linalg.matmul
  // CHECK-NEXT: [[HELD:%.+]] = util.optimization_barrier {irongrad.held} [[P]] : tensor<8x8xf32>
  %p = linalg.matmul ins(%x, %x : tensor<8x8xf32>, tensor<8x8xf32>) outs(%zeros : tensor<8x8xf32>) -> tensor<8x8xf32>
  // CHECK: linalg.generic {{.+}} ins([[HELD]], %{{.+}}, %{{.+}}, %{{.+}} : {{.+}})
  %r = linalg.generic {indexing_maps = [#order, #order, #order, #order, #order],
      iterator_types = ["parallel", "parallel"]}
      ins(%p, %x, %a, %b : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32>)
      outs(%zeros : tensor<8x8xf32>) {
  ^bb0(%in: f32, %s: f32, %t: f32, %u: f32, %out: f32):
    %first = arith.mulf %in, %s : f32
    %second = arith.mulf %t, %u : f32
    %sum = arith.addf %first, %second : f32
    linalg.yield %sum : f32
  } -> tensor<8x8xf32>
  util.return %r : tensor<8x8xf32>
}
