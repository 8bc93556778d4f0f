// In a loop, updates of a value from outside get a copy of it. Empty and filled tensors are created again instead.
// RUN: irongrad opt %s --pass loops-in-place

#device = #hal.device.affinity<@__device_0>
!value = !stream.resource<*>

util.func public @f(%x: !value, %row: !value, %size: index, %zero: f32) {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  // CHECK: [[TABLE:%.+]] = stream.tensor.dispatch {{.+}} @k::@start
  %start = stream.tensor.dispatch on(#device) @k::@start(%x) : (tensor<8xf32> in !value{%size})
      -> tensor<8xf32> in !value{%size}
  %zeros = stream.tensor.splat on(#device) %zero : f32 -> tensor<8xf32> in !value{%size}
  // CHECK: scf.for
  scf.for %t = %first to %last step %one {
    // CHECK-NEXT: [[SIZE:%.+]] = stream.resource.size [[TABLE]]
    // CHECK-NEXT: [[COPY:%.+]] = stream.async.transfer [[TABLE]] : !stream.resource<*>{[[SIZE]]}
    // CHECK-NEXT: stream.tensor.update {{.+}}, [[COPY]]{{\[}}
    %changed = stream.tensor.update on(#device) %row, %start[%t] : tensor<1xf32> in !value{%size}
        -> tensor<8xf32> in %start as !value{%size}
    // CHECK: [[ZEROS:%.+]] = stream.tensor.splat
    // CHECK-NEXT: stream.tensor.update {{.+}}, [[ZEROS]]{{\[}}
    %first_of_zeros = stream.tensor.update on(#device) %row, %zeros[%t] : tensor<1xf32> in !value{%size}
        -> tensor<8xf32> in %zeros as !value{%size}
    // CHECK: [[SIZE:%.+]] = stream.resource.size [[TABLE]]
    // CHECK-NEXT: [[TIED:%.+]] = stream.async.transfer [[TABLE]] : !stream.resource<*>{[[SIZE]]}
    // CHECK-NEXT: stream.tensor.dispatch {{.+}} @k::@step({{.+}}, [[TIED]]) : {{.+}} -> tensor<8xf32> in [[TIED]]
    %computed = stream.tensor.dispatch on(#device) @k::@step(%changed, %start)
        : (tensor<8xf32> in !value{%size}, tensor<8xf32> in !value{%size}) -> tensor<8xf32> in %start{%size}
    util.optimization_barrier %first_of_zeros : !value
    util.optimization_barrier %computed : !value
  }
  util.return
}
