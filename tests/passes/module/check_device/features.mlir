// If the code depends on no subgroup size, the module checks only its profile's features and workgroup size.
// RUN: irongrad opt %s --pass check-device --target vulkan:profile=mobile

// CHECK: util.initializer {
// CHECK: key("vulkan.feature" :: "{{.+}}") : i1, i32
// CHECK: cf.assert
// CHECK: key("vulkan.device" :: "max_compute_workgroup_invocations") : i1, i32
// CHECK: cf.assert
// CHECK-NOT: subgroup_size
// CHECK: util.return
// CHECK: func.func @step
func.func @step(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
