// A value that the loop reads, and one that depends on nothing with which the loop begins, stay as they are.
// RUN: irongrad opt %s --pass compute-before-loops
// UNCHANGED

module {
  util.func public @f(%x: !stream.resource<*>, %size: index, %c0: index, %c1: index) -> !stream.resource<*> {
    %a = stream.async.dispatch @e::@k(%x[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    %b = stream.async.dispatch @e::@m(%a[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    %c = stream.async.dispatch @e::@m(%x[%c0 to %size for %size]) : (!stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    // CHECK: scf.for
    %r = scf.for %t = %c0 to %size step %c1 iter_args(%i = %a) -> (!stream.resource<*>) {
      %n = stream.async.dispatch @e::@l(%i[%c0 to %size for %size], %b[%c0 to %size for %size]) : (!stream.resource<*>{%size}, !stream.resource<*>{%size}) -> !stream.resource<*>{%size}
      scf.yield %n : !stream.resource<*>
    }
    %y = stream.async.dispatch @e::@n(%b[%c0 to %size for %size], %c[%c0 to %size for %size], %r[%c0 to %size for %size]) : (!stream.resource<*>{%size}, !stream.resource<*>{%size}, !stream.resource<*>{%size}) -> !stream.resource<*>{%size}
    util.return %y : !stream.resource<*>
  }
}
