// Buffers up to the limit are allocated in each call.
// RUN: irongrad opt %s --pass 'keep-buffers{least=4096}'
// UNCHANGED

// CHECK: stream.resource.alloca {{.+}} !stream.resource<transient>
// CHECK: stream.resource.alloca {{.+}} !stream.resource<variable>
// CHECK: stream.resource.dealloca

util.global private mutable @state : !stream.resource<variable>
util.func public @f(%awaited: !stream.timepoint) {
  %size = arith.constant 4096 : index
  %zero = arith.constant 0 : index
  %byte = arith.constant 0 : i8
  %memory, %there = stream.resource.alloca uninitialized await(%awaited) => !stream.resource<transient>{%size}
      => !stream.timepoint
  %new, %ready = stream.resource.alloca uninitialized await(%awaited) => !stream.resource<variable>{%size}
      => !stream.timepoint
  %both = stream.timepoint.join max(%there, %ready) => !stream.timepoint
  %done = stream.cmd.execute await(%both) => with(%memory as %m: !stream.resource<transient>{%size},
      %new as %n: !stream.resource<variable>{%size}) {
    stream.cmd.fill %byte, %m[%zero for %size] : i8 -> !stream.resource<transient>{%size}
    stream.cmd.fill %byte, %n[%zero for %size] : i8 -> !stream.resource<variable>{%size}
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %memory : !stream.resource<transient>{%size} => !stream.timepoint
  util.global.store %new, @state : !stream.resource<variable>
  util.return
}
