// The condition takes two values but returns only the second. The pass makes it return both.
// RUN: irongrad opt %s --pass even-loops

util.func public @f(%limit: i32, %x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = arith.constant 0 : i32
  // CHECK: scf.while ([[N:%.+]] = %{{.+}}, [[T:%.+]] = %{{.+}}) : (i32, tensor<4xf32>) -> (i32, tensor<4xf32>)
  %r = scf.while (%n = %zero, %t = %x) : (i32, tensor<4xf32>) -> tensor<4xf32> {
    %go = arith.cmpi slt, %n, %limit : i32
    // CHECK: scf.condition(%{{.+}}) [[N]], [[T]]
    scf.condition(%go) %t : tensor<4xf32>
  } do {
  ^bb0(%t: tensor<4xf32>):
    // CHECK: util.optimization_barrier
    %one = util.optimization_barrier %limit : i32
    scf.yield %one, %t : i32, tensor<4xf32>
  }
  util.return %r : tensor<4xf32>
}
