// Two carries that begin as the same value keep their copies. Without them IREE would write both into one buffer.
// RUN: irongrad opt %s --pass loops-in-place
// UNCHANGED

#device = #hal.device.affinity<@__device_0>
!value = !stream.resource<*>

util.func public @f(%x: !value, %size: index) -> !value {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  %start = stream.tensor.dispatch on(#device) @k::@start(%x) : (tensor<8xf32> in !value{%size})
      -> tensor<8xf32> in !value{%size}
  %ends:2 = scf.for %t = %first to %last step %one iter_args(%a = %start, %b = %start)
      -> (!value, !value) {
    // CHECK: stream.async.transfer
    %copy = stream.async.transfer %a : !value{%size} -> to(#device) !value{%size}
    %next = stream.tensor.dispatch on(#device) @k::@step(%copy) : (tensor<8xf32> in !value{%size})
        -> tensor<8xf32> in !value{%size}
    // CHECK: stream.async.transfer
    %other = stream.async.transfer %b : !value{%size} -> to(#device) !value{%size}
    %last_of_b = stream.tensor.dispatch on(#device) @k::@step(%other) : (tensor<8xf32> in !value{%size})
        -> tensor<8xf32> in !value{%size}
    scf.yield %next, %last_of_b : !value, !value
  }
  util.return %ends#0 : !value
}
