// A carry that begins with an argument of the function keeps its copy, because the caller may hold an alias.
// RUN: irongrad opt %s --pass loops-in-place
// UNCHANGED

#device = #hal.device.affinity<@__device_0>
!value = !stream.resource<*>

util.func public @f(%x: !value, %view: !hal.buffer_view, %size: index)
    -> (!value, !stream.resource<external>) {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  // CHECK: stream.async.transfer
  %end = scf.for %t = %first to %last step %one iter_args(%state = %x) -> !value {
    %copy = stream.async.transfer %state : !value{%size} -> to(#device) !value{%size}
    %next = stream.tensor.dispatch on(#device) @k::@step(%copy) : (tensor<8xf32> in !value{%size})
        -> tensor<8xf32> in !value{%size}
    scf.yield %next : !value
  }
  %imported = stream.tensor.import on(#device) %view : !hal.buffer_view
      -> tensor<8xf32> in !stream.resource<external>{%size}
  // CHECK: stream.async.transfer
  %other = scf.for %t = %first to %last step %one iter_args(%state = %imported) -> !stream.resource<external> {
    %copy = stream.async.transfer %state : !stream.resource<external>{%size}
        -> to(#device) !stream.resource<external>{%size}
    %next = stream.tensor.dispatch on(#device) @k::@step(%copy) : (tensor<8xf32> in !stream.resource<external>{%size})
        -> tensor<8xf32> in !stream.resource<external>{%size}
    scf.yield %next : !stream.resource<external>
  }
  util.return %end, %other : !value, !stream.resource<external>
}
