// A branch reads two values, so each gets an allocation of its own. The submission waits for both allocations.
// RUN: irongrad opt %s --pass allocate-apart

util.func public @f(%chosen: i1) -> !stream.resource<transient> {
  // CHECK: [[A:%.+]] = arith.constant 256 : index
  %a = arith.constant 256 : index
  // CHECK: [[B:%.+]] = arith.constant 512 : index
  %b = arith.constant 512 : index
  %zero = arith.constant 0 : index
  %byte = arith.constant 0 : i8
  %total, %first, %second = stream.resource.pack slices({ [0, 0] = %a, [0, 0] = %b }) : index
  // CHECK: [[Y:%.+]], [[READY_Y:%.+]] = stream.resource.alloca {{.+}} !stream.resource<transient>{[[B]]}
  // CHECK-NEXT: [[X:%.+]], [[READY_X:%.+]] = stream.resource.alloca {{.+}} !stream.resource<transient>{[[A]]}
  // CHECK-NEXT: [[READY:%.+]] = stream.timepoint.join max([[READY_Y]], [[READY_X]])
  // CHECK-NOT: stream.resource.subview
  // CHECK: stream.cmd.execute await([[READY]])
  // CHECK-SAME: with([[X]] as {{.+}}: !stream.resource<transient>{[[A]]}, [[Y]] as
  %memory, %ready = stream.resource.alloca uninitialized : !stream.resource<transient>{%total} => !stream.timepoint
  %x = stream.resource.subview %memory[%first] : !stream.resource<transient>{%total} -> !stream.resource<transient>{%a}
  %y = stream.resource.subview %memory[%second] : !stream.resource<transient>{%total} -> !stream.resource<transient>{%b}
  %done = stream.cmd.execute await(%ready) => with(%x as %m: !stream.resource<transient>{%a},
      %y as %n: !stream.resource<transient>{%b}) {
    stream.cmd.fill %byte, %m[%zero for %a] : i8 -> !stream.resource<transient>{%a}
    stream.cmd.fill %byte, %n[%zero for %b] : i8 -> !stream.resource<transient>{%b}
  } => !stream.timepoint
  // CHECK: scf.if
  // CHECK-NEXT: scf.yield [[X]]
  // CHECK-NEXT: } else {
  // CHECK-NEXT: scf.yield [[Y]]
  %end = scf.if %chosen -> !stream.resource<transient> {
    scf.yield %x : !stream.resource<transient>
  } else {
    scf.yield %y : !stream.resource<transient>
  }
  %held = stream.timepoint.await %done => %end : !stream.resource<transient>{%a}
  util.return %held : !stream.resource<transient>
}
