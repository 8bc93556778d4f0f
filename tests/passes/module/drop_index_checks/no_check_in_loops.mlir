// Loops without checks stay as they are. So do checks outside of linalg's loops.
// RUN: irongrad opt %s --pass drop-index-checks
// UNCHANGED

#row = affine_map<(d0) -> (d0)>

func.func @doubled(%x: tensor<4xf32>, %asked: i1) -> tensor<4xf32> {
  // CHECK: cf.assert
  cf.assert %asked, "asked for"
  %first = arith.constant 0 : index
  %last = arith.constant 3 : index
  %one = arith.constant 1 : index
  scf.for %i = %first to %last step %one {
    %below = arith.cmpi slt, %i, %last : index
    // CHECK: cf.assert
    cf.assert %below, "of a loop of the user's own"
  }
  %empty = tensor.empty() : tensor<4xf32>
  %y = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%empty : tensor<4xf32>) {
  ^bb0(%in: f32, %out: f32):
    %sum = arith.addf %in, %in : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  return %y : tensor<4xf32>
}
