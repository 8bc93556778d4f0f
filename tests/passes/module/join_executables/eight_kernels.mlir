// Eight kernels keep one executable each.
// RUN: irongrad opt %s --pass join-executables
// UNCHANGED

// CHECK-COUNT-8: stream.executable private @k
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
