// Values with different live ranges keep one allocation, in which they may share memory.
// RUN: irongrad opt %s --pass allocate-apart
// UNCHANGED

util.func public @f(%chosen: i1) -> !stream.resource<transient> {
  %a = arith.constant 256 : index
  %b = arith.constant 512 : index
  %zero = arith.constant 0 : index
  %byte = arith.constant 0 : i8
  %total, %first, %second = stream.resource.pack slices({ [0, 0] = %a, [1, 1] = %b }) : index
  // CHECK: [[MEMORY:%.+]], {{.+}} = stream.resource.alloca
  // CHECK: stream.resource.subview [[MEMORY]]
  // CHECK: stream.resource.subview [[MEMORY]]
  %memory, %ready = stream.resource.alloca uninitialized : !stream.resource<transient>{%total} => !stream.timepoint
  %x = stream.resource.subview %memory[%first] : !stream.resource<transient>{%total} -> !stream.resource<transient>{%a}
  %y = stream.resource.subview %memory[%second] : !stream.resource<transient>{%total} -> !stream.resource<transient>{%b}
  %done = stream.cmd.execute await(%ready) => with(%x as %m: !stream.resource<transient>{%a},
      %y as %n: !stream.resource<transient>{%b}) {
    stream.cmd.fill %byte, %m[%zero for %a] : i8 -> !stream.resource<transient>{%a}
    stream.cmd.fill %byte, %n[%zero for %b] : i8 -> !stream.resource<transient>{%b}
  } => !stream.timepoint
  %end = scf.if %chosen -> !stream.resource<transient> {
    scf.yield %x : !stream.resource<transient>
  } else {
    scf.yield %y : !stream.resource<transient>
  }
  %held = stream.timepoint.await %done => %end : !stream.resource<transient>{%a}
  util.return %held : !stream.resource<transient>
}
