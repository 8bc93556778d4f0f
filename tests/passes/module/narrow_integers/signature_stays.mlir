// A function of the step graph keeps its signature, but computes in 32-bit integers. Other functions stay.
// RUN: irongrad opt %s --pass narrow-integers --target vulkan:profile=generic

#scalar = affine_map<() -> ()>
#row = affine_map<(d0) -> (d0)>

// CHECK-LABEL: func.func @main
// CHECK-SAME: (%{{.+}}: tensor<5xi64>, %{{.+}}: tensor<i64>)
// CHECK: call @graph.f(%{{.+}}, %{{.+}}) : (tensor<5xi64>, tensor<i64>) -> (tensor<5xi64>, tensor<i1>)
func.func @main(%x: tensor<5xi64>, %n: tensor<i64>) -> (tensor<5xi64>, tensor<i1>) {
  %r:2 = call @graph.f(%x, %n) : (tensor<5xi64>, tensor<i64>) -> (tensor<5xi64>, tensor<i1>)
  return %r#0, %r#1 : tensor<5xi64>, tensor<i1>
}

// CHECK: func.func private @graph.f([[X:%.+]]: tensor<5xi64>, [[N:%.+]]: tensor<i64>) -> (tensor<5xi64>, tensor<i1>)
// CHECK: [[PAIRS:%.+]] = flow.tensor.bitcast [[X]] : tensor<5xi64> -> tensor<5x2xi32>
// CHECK-NEXT: [[LOW:%.+]] = tensor.extract_slice [[PAIRS]][0, 0] [5, 1] [1, 1]
// CHECK-NEXT: [[HIGH:%.+]] = tensor.extract_slice [[PAIRS]][0, 1] [5, 1] [1, 1]
// CHECK: [[CUT:%.+]] = linalg.generic
// CHECK-SAME: ins([[LOW]], [[HIGH]] : tensor<5xi32>, tensor<5xi32>)
// CHECK: flow.tensor.bitcast [[N]] : tensor<i64> -> tensor<2xi32>
// CHECK: [[ONE:%.+]] = linalg.generic
// CHECK: call @graph.f.narrow([[CUT]], [[ONE]]) : (tensor<5xi32>, tensor<i32>) -> (tensor<5xi32>, tensor<i1>)
// CHECK: [[WIDE:%.+]] = flow.tensor.bitcast %{{.+}} : tensor<5x2xi32> -> tensor<5xi64>
// CHECK-NEXT: return [[WIDE]], %{{.+}} : tensor<5xi64>, tensor<i1>

// CHECK: func.func private @graph.f.narrow
// CHECK-NOT: i64
// CHECK: arith.constant dense<[1, -2, 3, -4, 5]> : tensor<5xi32>
// CHECK-NOT: i64
// CHECK: arith.maxsi {{.+}} : i32
// CHECK-NOT: i64
// CHECK: arith.cmpi slt, {{.+}} : i32
// CHECK-NOT: i64
// CHECK: return
// CHECK-NOT: i64
func.func private @graph.f(%x: tensor<5xi64>, %n: tensor<i64>) -> (tensor<5xi64>, tensor<i1>) {
  %limit = arith.constant 100 : i64
  %table = arith.constant dense<[1, -2, 3, -4, 5]> : tensor<5xi64>
  %empty = tensor.empty() : tensor<5xi64>
  %y = linalg.generic {indexing_maps = [#row, #row, #row], iterator_types = ["parallel"]}
      ins(%x, %table : tensor<5xi64>, tensor<5xi64>) outs(%empty : tensor<5xi64>) {
  ^bb0(%in: i64, %t: i64, %out: i64):
    %m = arith.maxsi %in, %t : i64
    linalg.yield %m : i64
  } -> tensor<5xi64>
  %none = tensor.empty() : tensor<i1>
  %flag = linalg.generic {indexing_maps = [#scalar, #scalar], iterator_types = []}
      ins(%n : tensor<i64>) outs(%none : tensor<i1>) {
  ^bb0(%in: i64, %out: i1):
    %small = arith.cmpi slt, %in, %limit : i64
    linalg.yield %small : i1
  } -> tensor<i1>
  return %y, %flag : tensor<5xi64>, tensor<i1>
}
