// Each exchange moves directly behind the last kernel that computes a part of it, and never before the step begins.
// RUN: irongrad opt %s --pass send-early

util.func private @comm.begin(i64) -> i32
util.func private @comm.finish() -> i32
util.func private @comm.allreduce(!hal.buffer_view, !hal.fence, !hal.fence) -> !hal.buffer_view

// CHECK: util.func public @f(
// CHECK: util.call @comm.begin
// CHECK: [[A:%.+]] = flow.dispatch @k::@a
// CHECK: [[WA:%.+]] = hal.tensor.barrier join([[A]]
// CHECK: hal.tensor.export [[WA]]
// CHECK: util.call @comm.allreduce
// CHECK: [[B:%.+]] = flow.dispatch @k::@b
// CHECK: hal.tensor.barrier join([[B]]
// CHECK: util.call @comm.allreduce
// CHECK: flow.dispatch @k::@c
// CHECK: util.call @comm.finish
util.func public @f(%x: tensor<64xf32>) -> (!hal.buffer_view, !hal.buffer_view) {
  %c0 = arith.constant 0 : index
  %c8 = arith.constant 8 : i64
  %early = flow.dispatch @k::@early(%x) : (tensor<64xf32>) -> tensor<64xf32>
  %agreed = util.call @comm.begin(%c8) : (i64) -> i32
  %a = flow.dispatch @k::@a(%early) : (tensor<64xf32>) -> tensor<64xf32>
  %b = flow.dispatch @k::@b(%a) : (tensor<64xf32>) -> tensor<64xf32>
  %c = flow.dispatch @k::@c(%b) : (tensor<64xf32>) -> tensor<64xf32>
  %device = hal.devices.get %c0 : !hal.device
  %w0 = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
  %s0 = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
  %j0 = hal.tensor.barrier join(%a : tensor<64xf32>) => %w0 : !hal.fence
  %v0 = hal.tensor.export %j0 : tensor<64xf32> -> !hal.buffer_view
  %r0 = util.call @comm.allreduce(%v0, %w0, %s0) : (!hal.buffer_view, !hal.fence, !hal.fence) -> !hal.buffer_view
  %w1 = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
  %s1 = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence
  %j1 = hal.tensor.barrier join(%b : tensor<64xf32>) => %w1 : !hal.fence
  %v1 = hal.tensor.export %j1 : tensor<64xf32> -> !hal.buffer_view
  %r1 = util.call @comm.allreduce(%v1, %w1, %s1) : (!hal.buffer_view, !hal.fence, !hal.fence) -> !hal.buffer_view
  %done = util.call @comm.finish() : () -> i32
  util.return %r0, %r1 : !hal.buffer_view, !hal.buffer_view
}
