// A splat that two operations read comes behind a barrier in a function with a loop. Others stay as they are.
// RUN: irongrad opt %s --pass keep-splats-apart

module {
  util.func public @step(%rows: i64, %size: index) -> (!stream.resource<*>, !stream.resource<*>, !stream.resource<*>) {
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    // CHECK: %[[SPLAT:.*]] = stream.tensor.splat %{{.*}} : i64
    // CHECK-NEXT: %[[HELD:.*]] = util.optimization_barrier %[[SPLAT]] : !stream.resource<*>
    // CHECK-NEXT: %[[ONCE:.*]] = stream.tensor.splat
    %0 = stream.tensor.splat %rows : i64 -> tensor<i64> in !stream.resource<*>{%size}
    %1 = stream.tensor.splat %rows : i64 -> tensor<2xi64> in !stream.resource<*>{%size}
    scf.for %i = %c0 to %size step %c1 {
    }
    // CHECK: util.return %[[HELD]], %[[ONCE]], %[[HELD]]
    util.return %0, %1, %0 : !stream.resource<*>, !stream.resource<*>, !stream.resource<*>
  }
  // CHECK: @without
  util.func public @without(%rows: i64, %size: index) -> (!stream.resource<*>, !stream.resource<*>) {
    // CHECK-NOT: util.optimization_barrier
    %0 = stream.tensor.splat %rows : i64 -> tensor<i64> in !stream.resource<*>{%size}
    util.return %0, %0 : !stream.resource<*>, !stream.resource<*>
  }
}
