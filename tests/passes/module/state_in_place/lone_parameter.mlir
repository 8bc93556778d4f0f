// State that begins with a single parameter gets a new buffer. IREE may map its file, which is read-only.
// RUN: irongrad opt %s --pass state-in-place
// UNCHANGED

!state = !stream.resource<variable>
!given = !stream.resource<external>

util.global private mutable @a : !state
util.global private mutable @ready : !stream.timepoint

util.initializer {
  %size = arith.constant 256 : index
  %one, %read = stream.resource.constants :
      !state{%size} = #stream.parameter.named<"state"::"one"> : tensor<8x8xf32>
      => !stream.timepoint
  util.global.store %one, @a : !state
  util.return
}

util.func public @f(%given: !given) {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %before = util.global.load @ready : !stream.timepoint
  %old = util.global.load @a : !state
  // CHECK: [[NEW:%.+]], %{{.+}} = stream.resource.alloca
  %new, %there = stream.resource.alloca uninitialized await(%before) => !state{%size} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%given as %g: !given{%size},
      %new as %n: !state{%size}) {
    stream.cmd.copy %g[%zero], %n[%zero], %size : !given{%size} -> !state{%size}
  } => !stream.timepoint
  // CHECK: util.global.store [[NEW]], @a
  util.global.store %new, @a : !state
  util.global.store %done, @ready : !stream.timepoint
  util.return
}
