// An inner loop's carry that begins with a value from outside both loops keeps its copy.
// The outer loop's next iteration reads the value again.
// RUN: irongrad opt %s --pass loops-in-place
// UNCHANGED

#device = #hal.device.affinity<@__device_0>
!value = !stream.resource<*>

util.func public @f(%x: !value, %size: index) {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  %start = stream.tensor.dispatch on(#device) @k::@start(%x) : (tensor<8xf32> in !value{%size})
      -> tensor<8xf32> in !value{%size}
  // CHECK: scf.for
  scf.for %s = %first to %last step %one {
    // CHECK: scf.for
    // CHECK-NEXT: stream.async.transfer
    %end = scf.for %t = %first to %last step %one iter_args(%state = %start) -> !value {
      %copy = stream.async.transfer %state : !value{%size} -> to(#device) !value{%size}
      %next = stream.tensor.dispatch on(#device) @k::@step(%copy) : (tensor<8xf32> in !value{%size})
          -> tensor<8xf32> in !value{%size}
      scf.yield %next : !value
    }
    util.optimization_barrier %end : !value
  }
  util.return
}
