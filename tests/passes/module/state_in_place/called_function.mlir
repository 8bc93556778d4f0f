// A function waits for the readers of the old state, and then calls the one that stores the new state in place.
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

util.func private @store(%given: !given) attributes {inlining_policy = #util.inline.never} {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  // CHECK: [[OLD:%.+]] = util.global.load @a
  // CHECK-NOT: stream.resource.alloca
  // CHECK: [[DONE:%.+]] = stream.cmd.execute {{.+}} with({{.+}}, [[OLD]] as
  // CHECK-NOT: util.global.store {{.+}}, @a
  // CHECK: util.global.store [[DONE]], @ready
  %new, %there = stream.resource.alloca uninitialized : !state{%size} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %g: !given{%size},
      %new as %n: !state{%size}) {
    stream.cmd.copy %g[%zero], %n[%zero], %size : !given{%size} -> !state{%size}
  } => !stream.timepoint
  util.global.store %new, @a : !state
  util.global.store %done, @ready : !stream.timepoint
  util.return
}

util.func public @step(%memory: !given, %fence: !hal.fence, %given: !given) {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %forever = arith.constant -1 : i32
  %before = util.global.load @ready : !stream.timepoint
  %a = util.global.load @a : !state
  %read = stream.cmd.execute await(%before) => with(%a as %x: !state{%size},
      %memory as %m: !given{%size}) {
    stream.cmd.copy %x[%zero], %m[%zero], %size : !state{%size} -> !given{%size}
  } => !stream.timepoint
  stream.timepoint.chain_external %read => (%fence : !hal.fence)
  %status = hal.fence.await until([%fence]) timeout_millis(%forever) flags("None") : i32
  util.call @store(%given) : (!given) -> ()
  util.return
}
