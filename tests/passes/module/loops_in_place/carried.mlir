// A loop updates its carry in place if nothing else reads the value that the carry begins with.
// RUN: irongrad opt %s --pass loops-in-place

#device = #hal.device.affinity<@__device_0>
!value = !stream.resource<*>

util.func public @f(%x: !value, %size: index) -> !value {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  // CHECK: [[START:%.+]] = stream.tensor.dispatch {{.+}} @k::@start
  %start = stream.tensor.dispatch on(#device) @k::@start(%x) : (tensor<8xf32> in !value{%size})
      -> tensor<8xf32> in !value{%size}
  // CHECK-NEXT: scf.for {{.+}} iter_args([[STATE:%[^ ]+]] = [[START]])
  // CHECK-NEXT: [[NEXT:%.+]] = stream.tensor.dispatch {{.+}} @k::@step([[STATE]])
  // CHECK-NEXT: scf.yield [[NEXT]]
  %end = scf.for %t = %first to %last step %one iter_args(%state = %start) -> !value {
    %copy = stream.async.transfer %state : !value{%size} -> to(#device) !value{%size}
    %next = stream.tensor.dispatch on(#device) @k::@step(%copy) : (tensor<8xf32> in !value{%size})
        -> tensor<8xf32> in !value{%size}
    scf.yield %next : !value
  }
  util.return %end : !value
}
