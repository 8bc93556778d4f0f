// What exists before the ranks have agreed on the step is exchanged after that, in the order of the calls.
// RUN: irongrad opt %s --pass send-early

util.func private @comm.begin(i64) -> i32
util.func private @comm.allreduce(!hal.buffer_view, !hal.fence, !hal.fence) -> !hal.buffer_view

// CHECK: util.func public @f(
// CHECK: flow.dispatch @k::@early
// CHECK: util.call @comm.begin
// CHECK: util.call @comm.allreduce
// CHECK: flow.dispatch @k::@late
util.func public @f(%x: tensor<64xf32>) -> (!hal.buffer_view, tensor<64xf32>) {
  %c0 = arith.constant 0 : index
  %c8 = arith.constant 8 : i64
  %early = flow.dispatch @k::@early(%x) : (tensor<64xf32>) -> tensor<64xf32>
  %agreed = util.call @comm.begin(%c8) : (i64) -> i32
  %late = flow.dispatch @k::@late(%early) : (tensor<64xf32>) -> tensor<64xf32>
  %device = hal.devices.get %c0 : !hal.device
  %w0 = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
  %s0 = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
  %j0 = hal.tensor.barrier join(%early : tensor<64xf32>) => %w0 : !hal.fence
  %v0 = hal.tensor.export %j0 : tensor<64xf32> -> !hal.buffer_view
  %r0 = util.call @comm.allreduce(%v0, %w0, %s0) : (!hal.buffer_view, !hal.fence, !hal.fence) -> !hal.buffer_view
  util.return %r0, %late : !hal.buffer_view, tensor<64xf32>
}
