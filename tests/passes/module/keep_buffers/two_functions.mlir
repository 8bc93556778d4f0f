// Two functions share one kept buffer of the larger size. Each waits for the last function that used it.
// RUN: irongrad opt %s --pass 'keep-buffers{least=1024}'

// CHECK-COUNT-1: util.global private mutable @__kept_0 :
// CHECK: [[SIZE:%.+]] = arith.constant 8192 : index
// CHECK-NEXT: stream.resource.alloc uninitialized : !stream.resource<transient>{[[SIZE]]}
// CHECK-NOT: stream.resource.alloc

// CHECK: util.func public @f
// CHECK: [[MEMORY:%.+]] = util.global.load @__kept_0 :
// CHECK-NEXT: [[LAST:%.+]] = util.global.load @__kept_0__ready
// CHECK-NEXT: [[READY:%.+]] = stream.timepoint.join max([[LAST]])
// CHECK-NEXT: [[DONE:%.+]] = stream.cmd.execute await([[READY]]) => with([[MEMORY]] as
// CHECK: util.global.store [[DONE]], @__kept_0__ready
util.func public @f() {
  %size = arith.constant 4096 : index
  %zero = arith.constant 0 : index
  %byte = arith.constant 0 : i8
  %memory, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%size} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%memory as %m: !stream.resource<transient>{%size}) {
    stream.cmd.fill %byte, %m[%zero for %size] : i8 -> !stream.resource<transient>{%size}
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %memory : !stream.resource<transient>{%size} => !stream.timepoint
  util.return
}

// CHECK: util.func public @g
// CHECK: [[MEMORY:%.+]] = util.global.load @__kept_0 :
// CHECK-NEXT: [[LAST:%.+]] = util.global.load @__kept_0__ready
// CHECK-NEXT: [[READY:%.+]] = stream.timepoint.join max([[LAST]])
// CHECK-NEXT: [[DONE:%.+]] = stream.cmd.execute await([[READY]]) => with([[MEMORY]] as
// CHECK: util.global.store [[DONE]], @__kept_0__ready
util.func public @g() {
  %size = arith.constant 8192 : index
  %zero = arith.constant 0 : index
  %byte = arith.constant 0 : i8
  %memory, %there = stream.resource.alloca uninitialized : !stream.resource<transient>{%size} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%memory as %m: !stream.resource<transient>{%size}) {
    stream.cmd.fill %byte, %m[%zero for %size] : i8 -> !stream.resource<transient>{%size}
  } => !stream.timepoint
  %freed = stream.resource.dealloca await(%done) => %memory : !stream.resource<transient>{%size} => !stream.timepoint
  util.return
}
