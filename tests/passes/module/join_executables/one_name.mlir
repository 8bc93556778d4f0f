// Kernels of the same name stay apart, because the names in an executable must differ.
// RUN: irongrad opt %s --pass join-executables
// UNCHANGED

// CHECK-COUNT-11: stream.executable private @k
stream.executable private @k0 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k1 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k2 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k3 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k4 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k5 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k6 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k7 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k8 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k9 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
stream.executable private @k10 { stream.executable.export public @g
  builtin.module { func.func @g() { return } } }
