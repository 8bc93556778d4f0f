// Each carry that begins empty or filled gets a tensor of its own before the loop, and is updated in place.
// RUN: irongrad opt %s --pass loops-in-place

#device = #hal.device.affinity<@__device_0>
!value = !stream.resource<*>

util.func public @f(%x: !value, %size: index, %zero: f32) -> !value {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %one = arith.constant 1 : index
  %empty = stream.tensor.empty on(#device) : tensor<8xf32> in !value{%size}
  %zeros = stream.tensor.splat on(#device) %zero : f32 -> tensor<8xf32> in !value{%size}
  // CHECK: stream.tensor.splat
  // CHECK-NEXT: [[ONE:%.+]] = stream.tensor.empty
  // CHECK-NEXT: [[OTHER:%.+]] = stream.tensor.empty
  // CHECK-NEXT: [[ZEROS:%.+]] = stream.tensor.splat
  // CHECK-NEXT: scf.for
  // CHECK-SAME: iter_args([[A:%[^ ]+]] = [[ONE]], [[B:%[^ ]+]] = [[OTHER]], [[C:%[^ ]+]] = [[ZEROS]])
  // CHECK-NEXT: stream.tensor.dispatch {{.+}} @k::@step([[A]], [[B]], [[C]])
  %ends:3 = scf.for %t = %first to %last step %one iter_args(%a = %empty, %b = %empty, %c = %zeros)
      -> (!value, !value, !value) {
    %copy_a = stream.async.transfer %a : !value{%size} -> to(#device) !value{%size}
    %copy_b = stream.async.transfer %b : !value{%size} -> to(#device) !value{%size}
    %copy_c = stream.async.transfer %c : !value{%size} -> to(#device) !value{%size}
    %next:3 = stream.tensor.dispatch on(#device) @k::@step(%copy_a, %copy_b, %copy_c)
        : (tensor<8xf32> in !value{%size}, tensor<8xf32> in !value{%size}, tensor<8xf32> in !value{%size})
        -> (tensor<8xf32> in !value{%size}, tensor<8xf32> in !value{%size}, tensor<8xf32> in !value{%size})
    scf.yield %next#0, %next#1, %next#2 : !value, !value, !value
  }
  util.return %ends#0 : !value
}
