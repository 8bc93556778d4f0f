// The pass drops the index check inside a gather's loops. A user's own check stays.
// RUN: irongrad opt %s --pass drop-index-checks

#row = affine_map<(d0) -> (d0)>

// CHECK-LABEL: func.func @lookup
// CHECK-SAME: ([[TABLE:%.+]]: tensor<7xf32>, {{.+}}, [[ASKED:%.+]]: i1)
func.func @lookup(%table: tensor<7xf32>, %indices: tensor<4xi64>, %asked: i1) -> tensor<4xf32> {
  // CHECK: cf.assert [[ASKED]], "asked for"
  cf.assert %asked, "asked for"
  %size = arith.constant 7 : i64
  %empty = tensor.empty() : tensor<4xf32>
  // CHECK: linalg.generic
  // CHECK-NOT: cf.assert
  // CHECK: [[PLACE:%.+]] = arith.index_cast
  // CHECK-NEXT: [[ELEMENT:%.+]] = tensor.extract [[TABLE]]{{\[}}[[PLACE]]]
  // CHECK-NEXT: linalg.yield [[ELEMENT]]
  // CHECK-NOT: cf.assert
  %rows = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%indices : tensor<4xi64>) outs(%empty : tensor<4xf32>) {
  ^bb0(%index: i64, %out: f32):
    %in_range = arith.cmpi slt, %index, %size : i64
    cf.assert %in_range, "index must be smaller than dim size"
    %place = arith.index_cast %index : i64 to index
    %element = tensor.extract %table[%place] : tensor<7xf32>
    linalg.yield %element : f32
  } -> tensor<4xf32>
  return %rows : tensor<4xf32>
}
