// The ordinals of a kernel that packs are those of its sizes; those of another kernel stay.
// RUN: irongrad opt %s --pass correct-ordinals

// CHECK-LABEL: stream.executable private @_encoding_0
stream.executable private @_encoding_0 {
  stream.executable.export public @pack workgroups(%b: index, %t: index) -> (index, index, index) {
    %x, %y, %z = iree_tensor_ext.dispatch.workgroup_count_from_slice(%b, %t, %t)
    stream.return %x, %y, %z : index, index, index
  }
  builtin.module {
    func.func @pack(%out: !stream.binding, %b: index, %t: index) {
      // CHECK: workload.ordinal %{{.*}}, 0 : index
      %0 = iree_tensor_ext.dispatch.workload.ordinal %b, 0 : index
      // CHECK: workload.ordinal %{{.*}}, 1 : index
      %1 = iree_tensor_ext.dispatch.workload.ordinal %t, 1 : index
      // CHECK: workload.ordinal %{{.*}}, 2 : index
      %2 = iree_tensor_ext.dispatch.workload.ordinal %t, 0 : index
      util.optimization_barrier %0, %1, %2 : index, index, index
      return
    }
  }
}

// CHECK-LABEL: stream.executable private @sums
stream.executable private @sums {
  stream.executable.export public @sums workgroups(%b: index, %t: index) -> (index, index, index) {
    %x, %y, %z = iree_tensor_ext.dispatch.workgroup_count_from_slice(%b, %t)
    stream.return %x, %y, %z : index, index, index
  }
  builtin.module {
    func.func @sums(%out: !stream.binding, %b: index, %t: index) {
      // CHECK: workload.ordinal %{{.*}}, 1 : index
      %0 = iree_tensor_ext.dispatch.workload.ordinal %t, 1 : index
      // CHECK: workload.ordinal %{{.*}}, 0 : index
      %1 = iree_tensor_ext.dispatch.workload.ordinal %b, 0 : index
      util.optimization_barrier %0, %1 : index, index
      return
    }
  }
}
