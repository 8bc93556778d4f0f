// Eleven kernels are joined into eight executables of one or two kernels, and every dispatch names the new one.
// RUN: irongrad opt %s --pass join-executables

// CHECK: stream.executable private @k0 {
// CHECK-NEXT: stream.executable.export public @g0
// CHECK-NEXT: stream.executable.export public @g8
// CHECK-NEXT: builtin.module {
// CHECK-NEXT: func.func @g8(
// CHECK: func.func @g0(
// CHECK: stream.executable private @k1 {
// CHECK-NEXT: stream.executable.export public @g1
// CHECK-NEXT: stream.executable.export public @g9
// CHECK-NEXT: builtin.module {
// CHECK-NEXT: func.func @g9(
// CHECK: func.func @g1(
// CHECK: stream.executable private @k2 {
// CHECK-NEXT: stream.executable.export public @g2
// CHECK-NEXT: stream.executable.export public @g10
// CHECK-NEXT: builtin.module {
// CHECK-NEXT: func.func @g10(
// CHECK: func.func @g2(
// CHECK-COUNT-5: stream.executable private @k
// CHECK-NOT: stream.executable private

stream.executable private @k0 { stream.executable.export public @g0
  builtin.module { func.func @g0(%x: !stream.binding) { return } } }
stream.executable private @k1 { stream.executable.export public @g1
  builtin.module { func.func @g1(%x: !stream.binding) { return } } }
stream.executable private @k2 { stream.executable.export public @g2
  builtin.module { func.func @g2(%x: !stream.binding) { return } } }
stream.executable private @k3 { stream.executable.export public @g3
  builtin.module { func.func @g3(%x: !stream.binding) { return } } }
stream.executable private @k4 { stream.executable.export public @g4
  builtin.module { func.func @g4(%x: !stream.binding) { return } } }
stream.executable private @k5 { stream.executable.export public @g5
  builtin.module { func.func @g5(%x: !stream.binding) { return } } }
stream.executable private @k6 { stream.executable.export public @g6
  builtin.module { func.func @g6(%x: !stream.binding) { return } } }
stream.executable private @k7 { stream.executable.export public @g7
  builtin.module { func.func @g7(%x: !stream.binding) { return } } }
stream.executable private @k8 { stream.executable.export public @g8
  builtin.module { func.func @g8(%x: !stream.binding) { return } } }
stream.executable private @k9 { stream.executable.export public @g9
  builtin.module { func.func @g9(%x: !stream.binding) { return } } }
stream.executable private @k10 { stream.executable.export public @g10
  builtin.module { func.func @g10(%x: !stream.binding) { return } } }

// CHECK: util.func public @f()
util.func public @f() {
  %size = arith.constant 64 : index
  %zero = arith.constant 0 : index
  %memory, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%size} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%memory as %m: !stream.resource<transient>{%size}) {
    // CHECK: stream.cmd.dispatch @k0::@g0
    stream.cmd.dispatch @k0::@g0 { rw %m[%zero for %size] : !stream.resource<transient>{%size} }
    // CHECK: stream.cmd.dispatch @k0::@g8
    stream.cmd.dispatch @k8::@g8 { rw %m[%zero for %size] : !stream.resource<transient>{%size} }
    // CHECK: stream.cmd.dispatch @k2::@g10
    stream.cmd.dispatch @k10::@g10 { rw %m[%zero for %size] : !stream.resource<transient>{%size} }
  } => !stream.timepoint
  util.return
}
