// State gets a new buffer if the kernel reads it a second time, transposed.
// RUN: irongrad opt %s --pass state-in-place
// UNCHANGED

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
  %old = util.global.load @a : !state
  // CHECK: [[NEW:%.+]], %{{.+}} = stream.resource.alloca
  %new, %there = stream.resource.alloca uninitialized await(%before) => !state{%size} => !stream.timepoint
  %done = stream.cmd.execute await(%there) => with(%old as %o: !state{%size},
      %given as %g: !given{%size},
      %new as %n: !state{%size}) {
    stream.cmd.dispatch @kernel::@kernel {
      ro %o[%zero for %size] : !state{%size},
      ro %o[%zero for %size] : !state{%size},
      wo %n[%zero for %size] : !state{%size}
    }
  } => !stream.timepoint
  // CHECK: util.global.store [[NEW]], @a
  util.global.store %new, @a : !state
  util.global.store %done, @ready : !stream.timepoint
  util.return
}
