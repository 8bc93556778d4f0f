// What a loop begins with is held behind the loop for the kernels after it; another loop reads the value itself.
// RUN: irongrad opt %s --pass compute-before-loops

module {
  util.func public @f(%x: !stream.resource<*>, %size: index, %c0: index, %c1: index) -> !stream.resource<*> {
    // CHECK: [[A:%.+]] = stream.async.dispatch @e::@k
    %a = stream.async.dispatch @e::@k(%x[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    // CHECK: scf.for
    %r = scf.for %t = %c0 to %size step %c1 iter_args(%i = %a) -> (!stream.resource<*>) {
      %n = stream.async.dispatch @e::@l(%i[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
      scf.yield %n : !stream.resource<*>
    }
    // CHECK: [[HELD:%.+]] = util.optimization_barrier [[A]]
    // CHECK: scf.for {{.*}} = [[A]])
    %s = scf.for %t = %c0 to %size step %c1 iter_args(%i = %a) -> (!stream.resource<*>) {
      %n = stream.async.dispatch @e::@l(%i[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
      scf.yield %n : !stream.resource<*>
    }
    // CHECK: @e::@n([[HELD]][
    %y = stream.async.dispatch @e::@n(%a[%c0 to %size for %size], %r[%c0 to %size for %size], %s[%c0 to %size for %size]) : (!stream.resource<*>{%size}, !stream.resource<*>{%size}, !stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    util.return %y : !stream.resource<*>
  }
}
