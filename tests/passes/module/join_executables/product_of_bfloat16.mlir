// With microkernels, a product that is not float32 keeps its own executable: an executable declares one microkernel.
// RUN: irongrad opt %s --pass join-executables

// CHECK: stream.executable private @product {
// CHECK-NEXT: stream.executable.export public @matmul_bf16
// CHECK-NEXT: builtin.module {
// CHECK: stream.executable private @k0 {
// CHECK-NEXT: stream.executable.export public @g0
// CHECK-NEXT: stream.executable.export public @g8
// CHECK-COUNT-7: stream.executable private @k
// CHECK-NOT: stream.executable private
stream.executable private @product { stream.executable.export public @matmul_bf16
  builtin.module { func.func @matmul_bf16() { %x = tensor.empty() : tensor<4x4xbf16> return } } }
stream.executable private @k0 { stream.executable.export public @g0
  builtin.module { func.func @g0() { return } } }
stream.executable private @k1 { stream.executable.export public @g1
  builtin.module { func.func @g1() { return } } }
stream.executable private @k2 { stream.executable.export public @g2
  builtin.module { func.func @g2() { return } } }
stream.executable private @k3 { stream.executable.export public @g3
  builtin.module { func.func @g3() { return } } }
stream.executable private @k4 { stream.executable.export public @g4
  builtin.module { func.func @g4() { return } } }
stream.executable private @k5 { stream.executable.export public @g5
  builtin.module { func.func @g5() { return } } }
stream.executable private @k6 { stream.executable.export public @g6
  builtin.module { func.func @g6() { return } } }
stream.executable private @k7 { stream.executable.export public @g7
  builtin.module { func.func @g7() { return } } }
stream.executable private @k8 { stream.executable.export public @g8
  builtin.module { func.func @g8() { return } } }
