// Memory is freed after the state is written in place. This is allowed, because freeing cannot fail.
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
  %room, %made = stream.resource.alloca uninitialized await(%before)
      => !stream.resource<transient>{%size} => !stream.timepoint
  %new, %there = stream.resource.alloca uninitialized await(%before) => !state{%size} => !stream.timepoint
  %both = stream.timepoint.join max(%there, %made) => !stream.timepoint
  // CHECK: stream.resource.alloca {{.+}} !stream.resource<transient>
  // CHECK-NOT: stream.resource.alloca
  // CHECK: [[DONE:%.+]] = stream.cmd.execute {{.+}} with({{.+}}, [[OLD]] as
  // CHECK: stream.resource.dealloca await([[DONE]])
  %done = stream.cmd.execute await(%both) => with(%given as %g: !given{%size},
      %new as %n: !state{%size},
      %room as %r: !stream.resource<transient>{%size}) {
    stream.cmd.copy %g[%zero], %n[%zero], %size : !given{%size} -> !state{%size}
    stream.cmd.copy %g[%zero], %r[%zero], %size : !given{%size} -> !stream.resource<transient>{%size}
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %room : !stream.resource<transient>{%size} => !stream.timepoint
  // CHECK-NOT: util.global.store {{.+}}, @a
  // CHECK: util.global.store [[DONE]], @ready
  util.global.store %new, @a : !state
  util.global.store %done, @ready : !stream.timepoint
  util.return
}
