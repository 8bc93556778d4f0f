// The first initializer checks the device's workgroup size and subgroup size. It refuses a device with others.
// RUN: irongrad opt %s --pass check-device --target vulkan:profile=generic,subgroup=32

// CHECK: module {
// CHECK-NEXT: util.initializer {
// CHECK-NEXT: [[FIRST:%.+]] = arith.constant 0 : index
// CHECK-NEXT: [[DEVICE:%.+]] = hal.devices.get [[FIRST]] : !hal.device
// CHECK: hal.device.query<[[DEVICE]] : !hal.device> key("vulkan.device" :: "max_compute_workgroup_invocations")
// CHECK-NEXT: [[LEAST:%.+]] = arith.constant 128 : i32
// CHECK-NEXT: [[ENOUGH:%.+]] = arith.cmpi sge, %{{.+}}, [[LEAST]] : i32
// CHECK-NEXT: cf.assert [[ENOUGH]], "this module needs a Vulkan device with workgroups of 128 invocations
// CHECK-NEXT: %{{.+}}, [[LANES:%.+]] = hal.device.query<[[DEVICE]] : !hal.device>
// CHECK-SAME: key("vulkan.device" :: "subgroup_size") : i1, i32
// CHECK-NEXT: [[SIZE:%.+]] = arith.constant 32 : i32
// CHECK-NEXT: [[EQUAL:%.+]] = arith.cmpi eq, [[LANES]], [[SIZE]] : i32
// CHECK-NEXT: cf.assert [[EQUAL]], "this module is compiled for Vulkan devices whose subgroups have 32 lanes
// CHECK-NEXT: util.return
// CHECK-NEXT: }
// CHECK-NEXT: util.global private @state
util.global private @state = dense<0.0> : tensor<4xf32>
func.func @step(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
