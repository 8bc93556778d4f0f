// An executable that already has several kernels stays as it is. The pass joins the others.
// RUN: irongrad opt %s --pass join-executables

// CHECK: stream.executable private @several {
// CHECK-NEXT: stream.executable.export public @a
// CHECK-NEXT: stream.executable.export public @b
// CHECK-NEXT: builtin.module {
// CHECK: func.func @a()
// CHECK: func.func @b()
// CHECK-COUNT-8: stream.executable private @k
// CHECK-NOT: stream.executable private
stream.executable private @several {
  stream.executable.export public @a
  stream.executable.export public @b
  builtin.module { func.func @a() { return } func.func @b() { return } }
}
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
stream.executable private @k9 { stream.executable.export public @g9
  builtin.module { func.func @g9() { return } } }
stream.executable private @k10 { stream.executable.export public @g10
  builtin.module { func.func @g10() { return } } }
