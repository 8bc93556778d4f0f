// A value that is read after a loop is held before it, if the loop begins with what the value depends on.
// RUN: irongrad opt %s --pass compute-before-loops

module {
  util.func public @f(%x: !stream.resource<*>, %size: index, %c0: index, %c1: index) -> !stream.resource<*> {
    %a = stream.async.dispatch @e::@k(%x[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    %b = stream.async.dispatch @e::@m(%a[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    // CHECK: [[HELD:%.+]] = util.optimization_barrier
    // CHECK-NEXT: scf.for
    %r = scf.for %t = %c0 to %size step %c1 iter_args(%i = %a) -> (!stream.resource<*>) {
      %n = stream.async.dispatch @e::@l(%i[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
      scf.yield %n : !stream.resource<*>
    }
    // CHECK: @e::@n([[HELD]][
    %y = stream.async.dispatch @e::@n(%b[%c0 to %size for %size], %r[%c0 to %size for %size]) : (!stream.resource<*>{%size}, !stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    util.return %y : !stream.resource<*>
  }
}
