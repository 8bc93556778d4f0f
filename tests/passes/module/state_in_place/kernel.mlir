// A kernel writes state in place if it reads each element only for the same element of its result.
// RUN: irongrad opt %s --pass state-in-place

!state = !stream.resource<variable>
!given = !stream.resource<external>
!read = !iree_tensor_ext.dispatch.tensor<readonly:tensor<8x8xf32>>
!written = !iree_tensor_ext.dispatch.tensor<writeonly:tensor<8x8xf32>>

util.global private mutable @a : !state
util.global private mutable @ready : !stream.timepoint

stream.executable private @kernel {
  stream.executable.export public @kernel
  builtin.module {
    func.func @kernel(%old: !stream.binding, %given: !stream.binding, %new: !stream.binding) {
      %zero = arith.constant 0 : index
      %o = stream.binding.subspan %old[%zero] : !stream.binding -> !read
      %g = stream.binding.subspan %given[%zero] : !stream.binding -> !read
      %n = stream.binding.subspan %new[%zero] : !stream.binding -> !written
      %was = iree_tensor_ext.dispatch.tensor.load %o, offsets = [0, 0], sizes = [8, 8], strides = [1, 1]
          : !read -> tensor<8x8xf32>
      %by = iree_tensor_ext.dispatch.tensor.load %g, offsets = [0, 0], sizes = [8, 8], strides = [1, 1]
          : !read -> tensor<8x8xf32>
      %room = tensor.empty() : tensor<8x8xf32>
      %is = linalg.generic {
          indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (j, i)>,
                           affine_map<(i, j) -> (i, j)>],
          iterator_types = ["parallel", "parallel"]}
          ins(%was, %by : tensor<8x8xf32>, tensor<8x8xf32>) outs(%room : tensor<8x8xf32>) {
      ^bb0(%x: f32, %y: f32, %out: f32):
        %sum = arith.addf %x, %y : f32
        linalg.yield %sum : f32
      } -> tensor<8x8xf32>
      iree_tensor_ext.dispatch.tensor.store %is, %n, offsets = [0, 0], sizes = [8, 8], strides = [1, 1]
          : tensor<8x8xf32> -> !written
      return
    }
  }
}

util.initializer {
  %size = arith.constant 256 : index
  %one = stream.resource.alloc uninitialized : !state{%size}
  util.global.store %one, @a : !state
  util.return
}

util.func public @f(%given: !given) {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %before = util.global.load @ready : !stream.timepoint
  // CHECK: [[OLD:%.+]] = util.global.load @a
  %old = util.global.load @a : !state
  %new, %there = stream.resource.alloca uninitialized await(%before) => !state{%size} => !stream.timepoint
  // CHECK-NOT: stream.resource.alloca
  // CHECK: [[DONE:%.+]] = stream.cmd.execute
  // CHECK-SAME: with([[OLD]] as [[O:%[^ ]+]]: {{.+}}, [[OLD]] as [[N:%[^ ]+]]: {{.+}}) {
  // CHECK: ro [[O]]{{\[}}
  // CHECK: wo [[N]]{{\[}}
  %done = stream.cmd.execute await(%there) => with(%old as %o: !state{%size},
      %given as %g: !given{%size},
      %new as %n: !state{%size}) {
    stream.cmd.dispatch @kernel::@kernel {
      ro %o[%zero for %size] : !state{%size},
      ro %g[%zero for %size] : !given{%size},
      wo %n[%zero for %size] : !state{%size}
    }
  } => !stream.timepoint
  // CHECK-NOT: util.global.store {{.+}}, @a
  // CHECK: util.global.store [[DONE]], @ready
  util.global.store %new, @a : !state
  util.global.store %done, @ready : !stream.timepoint
  util.return
}
