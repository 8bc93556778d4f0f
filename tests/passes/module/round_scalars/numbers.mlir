// The only number of a tensor is rounded to bfloat16 by integer operations; the elements of larger tensors are not.
// RUN: irongrad opt %s --pass round-scalars

#number = affine_map<() -> ()>
#row = affine_map<(i) -> (i)>

// CHECK-LABEL: @number
util.func public @number(%x: tensor<f32>) -> tensor<bf16> {
  %empty = tensor.empty() : tensor<bf16>
  // CHECK: %[[OLD:.*]] = arith.bitcast %[[IN:.*]] : f32 to i32
  // CHECK: arith.addi
  // CHECK: %[[KEPT:.*]] = arith.andi %{{.*}}, %{{.*}} : i32
  // CHECK: %[[NEAREST:.*]] = arith.bitcast %[[KEPT]] : i32 to f32
  // CHECK: %[[NAN:.*]] = arith.cmpf uno, %[[IN]], %[[IN]]
  // CHECK: %[[ROUNDED:.*]] = arith.select %[[NAN]], %[[IN]], %[[NEAREST]]
  // CHECK: arith.truncf %[[ROUNDED]] : f32 to bf16
  %r = linalg.generic {indexing_maps = [#number, #number], iterator_types = []}
      ins(%x : tensor<f32>) outs(%empty : tensor<bf16>) {
  ^bb0(%in: f32, %out: bf16):
    %h = arith.truncf %in : f32 to bf16
    linalg.yield %h : bf16
  } -> tensor<bf16>
  util.return %r : tensor<bf16>
}

// CHECK-LABEL: @row
// CHECK-NOT: arith.bitcast
util.func public @row(%x: tensor<8xf32>) -> tensor<8xbf16> {
  %empty = tensor.empty() : tensor<8xbf16>
  %r = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<8xf32>) outs(%empty : tensor<8xbf16>) {
  ^bb0(%in: f32, %out: bf16):
    %h = arith.truncf %in : f32 to bf16
    linalg.yield %h : bf16
  } -> tensor<8xbf16>
  util.return %r : tensor<8xbf16>
}

// CHECK-LABEL: @of_float16
// CHECK-NOT: arith.bitcast
util.func public @of_float16(%x: tensor<f32>) -> tensor<f16> {
  %empty = tensor.empty() : tensor<f16>
  %r = linalg.generic {indexing_maps = [#number, #number], iterator_types = []}
      ins(%x : tensor<f32>) outs(%empty : tensor<f16>) {
  ^bb0(%in: f32, %out: f16):
    %h = arith.truncf %in : f32 to f16
    linalg.yield %h : f16
  } -> tensor<f16>
  util.return %r : tensor<f16>
}
