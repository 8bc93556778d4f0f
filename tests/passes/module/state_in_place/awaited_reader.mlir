// Another function reads the old state and waits for that read, so the state is written in place.
// RUN: irongrad opt %s --pass state-in-place

!state = !stream.resource<variable>
!given = !stream.resource<external>

util.global private mutable @a : !state
util.global private mutable @ready : !stream.timepoint

util.initializer {
  %size = arith.constant 256 : index
  %one = stream.resource.alloc uninitialized : !state{%size}
  util.global.store %one, @a : !state
  util.return
}

util.func public @f(%given: !given) {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %before = util.global.load @ready : !stream.timepoint
  // CHECK: [[OLD:%.+]] = util.global.load @a
  %old = util.global.load @a : !state
  %new, %there = stream.resource.alloca uninitialized await(%before) => !state{%size} => !stream.timepoint
  // CHECK-NOT: stream.resource.alloca
  // CHECK: [[DONE:%.+]] = stream.cmd.execute {{.+}} with({{.+}}, [[OLD]] as
  %done = stream.cmd.execute await(%there) => with(%given as %g: !given{%size},
      %new as %n: !state{%size}) {
    stream.cmd.copy %g[%zero], %n[%zero], %size : !given{%size} -> !state{%size}
  } => !stream.timepoint
  // CHECK-NOT: util.global.store {{.+}}, @a
  // CHECK: util.global.store [[DONE]], @ready
  util.global.store %new, @a : !state
  util.global.store %done, @ready : !stream.timepoint
  util.return
}

util.func public @g(%memory: !given) {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %before = util.global.load @ready : !stream.timepoint
  %a = util.global.load @a : !state
  %read = stream.cmd.execute await(%before) => with(%a as %x: !state{%size},
      %memory as %m: !given{%size}) {
    stream.cmd.copy %x[%zero], %m[%zero], %size : !state{%size} -> !given{%size}
  } => !stream.timepoint
  %held = stream.timepoint.await %read => %memory : !given{%size}
  util.return
}
