// A splat that two operations read comes behind a barrier. One with a single reader stays as it is.
// RUN: irongrad opt %s --pass keep-splats-apart

module {
  util.func public @step(%rows: i64, %size: index) -> (!stream.resource<*>, !stream.resource<*>, !stream.resource<*>) {
    // CHECK: %[[SPLAT:.*]] = stream.tensor.splat %{{.*}} : i64
    // CHECK-NEXT: %[[HELD:.*]] = util.optimization_barrier %[[SPLAT]] : !stream.resource<*>
    // CHECK-NEXT: %[[ONCE:.*]] = stream.tensor.splat
    %0 = stream.tensor.splat %rows : i64 -> tensor<i64> in !stream.resource<*>{%size}
    %1 = stream.tensor.splat %rows : i64 -> tensor<2xi64> in !stream.resource<*>{%size}
    // CHECK-NEXT: util.return %[[HELD]], %[[ONCE]], %[[HELD]]
    util.return %0, %1, %0 : !stream.resource<*>, !stream.resource<*>, !stream.resource<*>
  }
}
