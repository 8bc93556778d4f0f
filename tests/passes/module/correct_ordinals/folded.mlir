// A kernel's ordinals are the first places of its sizes in the count, by the values that calls pass. Kernels that take
// each size once stay, and so do numbers that are no size.
// RUN: irongrad opt %s --pass correct-ordinals

// CHECK-LABEL: stream.executable private @pack
stream.executable private @pack {
  stream.executable.export public @pack workgroups(%b: index, %t: index) -> (index, index, index) {
    %x, %y, %z = iree_tensor_ext.dispatch.workgroup_count_from_slice(%b, %b, %t, %t)
    stream.return %x, %y, %z : index, index, index
  }
  builtin.module {
    func.func @pack(%out: !stream.binding, %low: i32, %high: i32, %first: i32, %other: i32) {
      %bits = arith.constant 32 : i64
      %l = arith.extui %low : i32 to i64
      %h = arith.extui %high : i32 to i64
      %shifted = arith.shli %h, %bits : i64
      %both = arith.ori %l, %shifted : i64
      %b = arith.index_castui %both : i64 to index
      %t = arith.index_castui %first : i32 to index
      %n = arith.index_castui %other : i32 to index
      %known:2 = util.assume.int %t<umin = 0, umax = 9007199254740991>, %b<umin = 0, umax = 9007199254740991>
          : index, index
      // CHECK: workload.ordinal {{.*}}#0, 2 : index
      %0 = iree_tensor_ext.dispatch.workload.ordinal %known#0, 1 : index
      // CHECK: workload.ordinal {{.*}}#0, 2 : index
      %1 = iree_tensor_ext.dispatch.workload.ordinal %known#0, 0 : index
      // CHECK: workload.ordinal {{.*}}#1, 0 : index
      %2 = iree_tensor_ext.dispatch.workload.ordinal %known#1, 0 : index
      // CHECK: workload.ordinal {{.*}}, 3 : index
      %3 = iree_tensor_ext.dispatch.workload.ordinal %n, 3 : index
      util.optimization_barrier %0, %1, %2, %3 : index, index, index, index
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
    func.func @sums(%out: !stream.binding, %first: i32, %second: i32) {
      %b = arith.index_castui %first : i32 to index
      %t = arith.index_castui %second : i32 to index
      // CHECK: workload.ordinal %{{.*}}, 1 : index
      %0 = iree_tensor_ext.dispatch.workload.ordinal %t, 1 : index
      // CHECK: workload.ordinal %{{.*}}, 0 : index
      %1 = iree_tensor_ext.dispatch.workload.ordinal %b, 0 : index
      util.optimization_barrier %0, %1 : index, index
      return
    }
  }
}

util.func public @f(%b: index, %t: index, %n: index, %room: !stream.resource<external>, %size: index) {
  %c0 = arith.constant 0 : index
  %bits = arith.constant 32 : i64
  %wide = arith.index_castui %b : index to i64
  %low = arith.trunci %wide : i64 to i32
  %above = arith.shrui %wide, %bits : i64
  %high = arith.trunci %above : i64 to i32
  %first = arith.index_castui %t : index to i32
  %small = arith.index_castui %b : index to i32
  %other = arith.index_castui %n : index to i32
  %done = stream.cmd.execute with(%room as %in: !stream.resource<external>{%size}) {
    stream.cmd.dispatch @pack::@pack[%b, %t](%low, %high, %first, %other : i32, i32, i32, i32) {
      wo %in[%c0 for %size] : !stream.resource<external>{%size}
    }
    stream.cmd.dispatch @sums::@sums[%b, %t](%small, %first : i32, i32) {
      wo %in[%c0 for %size] : !stream.resource<external>{%size}
    }
  } => !stream.timepoint
  util.optimization_barrier %done : !stream.timepoint
  util.return
}
