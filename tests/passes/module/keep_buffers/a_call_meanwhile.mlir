// A buffer for intermediate values is not kept if its function calls another one, which could use the same buffer.
// RUN: irongrad opt %s --pass 'keep-buffers{least=1024}'

// CHECK: util.global private mutable @__kept_state_0 : !stream.resource<variable>
// CHECK: [[ONE:%.+]] = stream.resource.alloc uninitialized : !stream.resource<variable>
// CHECK: util.global.store [[ONE]], @__kept_state_0 :
// CHECK: util.global private mutable @__kept_state_0__other : !stream.resource<variable>
// CHECK: [[OTHER:%.+]] = stream.resource.alloc uninitialized : !stream.resource<variable>
// CHECK: util.global.store [[OTHER]], @__kept_state_0__other :
// CHECK-NOT: util.global private mutable @__kept_0
// CHECK: util.func public @f([[AWAITED:%.+]]: !stream.timepoint
// CHECK: [[MEMORY:%.+]], [[THERE:%.+]] = stream.resource.alloca {{.+}} !stream.resource<transient>
// CHECK-NOT: stream.resource.alloca
// CHECK: [[NEW:%.+]] = util.global.load @__kept_state_0 :
// CHECK-NEXT: [[OLD:%.+]] = util.global.load @__kept_state_0__other
// CHECK-NEXT: [[READY:%.+]] = stream.timepoint.join max([[AWAITED]])
// CHECK-NEXT: [[BOTH:%.+]] = stream.timepoint.join max([[THERE]], [[READY]])
// CHECK-NEXT: [[DONE:%.+]] = stream.cmd.execute await([[BOTH]])
// CHECK-SAME: with([[MEMORY]] as {{.+}}, [[NEW]] as
// CHECK: stream.resource.dealloca {{.+}} [[MEMORY]]
// CHECK: util.global.store [[NEW]], @state
// CHECK-NEXT: util.global.store [[OLD]], @__kept_state_0 :
// CHECK-NEXT: util.global.store [[NEW]], @__kept_state_0__other

util.global private mutable @state : !stream.resource<variable>
util.func private @other()
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
  util.call @other() : () -> ()
  %freed = stream.resource.dealloca await(%done) => %memory : !stream.resource<transient>{%size} => !stream.timepoint
  util.global.store %new, @state : !stream.resource<variable>
  util.return
}
