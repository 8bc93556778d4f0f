// Two globals get new state from one allocation. Only one is in place, because nothing awaits a read of the other.
// RUN: irongrad opt %s --pass state-in-place

!state = !stream.resource<variable>
!given = !stream.resource<external>
!read = !iree_tensor_ext.dispatch.tensor<readonly:tensor<8x8xf32>>
!written = !iree_tensor_ext.dispatch.tensor<writeonly:tensor<8x8xf32>>

util.global private mutable @a : !state
util.global private mutable @b : !state
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
  %other = stream.resource.alloc uninitialized : !state{%size}
  util.global.store %one, @a : !state
  util.global.store %other, @b : !state
  util.return
}

util.func public @f(%given: !given) {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %before = util.global.load @ready : !stream.timepoint
  // CHECK: [[OLD:%.+]] = util.global.load @a
  %old = util.global.load @a : !state
  // CHECK: [[PLACES:%.+]]:2 = stream.resource.pack slices({
  // CHECK-NEXT: [0, 1] = %{{[^ ]+$}}
  // CHECK-NEXT: }) : index
  // CHECK-NEXT: [[MEMORY:%.+]], %{{.+}} = stream.resource.alloca {{.+}}{[[PLACES]]#0}
  // CHECK-NEXT: [[KEPT:%.+]] = stream.resource.subview [[MEMORY]]{{\[}}[[PLACES]]#1]
  // CHECK-NOT: stream.resource.subview
  // CHECK: [[DONE:%.+]] = stream.cmd.execute {{.+}} with([[OLD]] as {{.+}}, [[OLD]] as {{.+}}, [[KEPT]] as
  %total, %first, %second = stream.resource.pack slices({ [0, 1] = %size, [0, 1] = %size }) : index
  %memory, %there = stream.resource.alloca uninitialized await(%before) => !state{%total} => !stream.timepoint
  %new = stream.resource.subview %memory[%first] : !state{%total} -> !state{%size}
  %kept = stream.resource.subview %memory[%second] : !state{%total} -> !state{%size}
  %done = stream.cmd.execute await(%there) => with(%old as %o: !state{%size},
      %given as %g: !given{%size}, %new as %n: !state{%size}, %kept as %k: !state{%size}) {
    stream.cmd.dispatch @kernel::@kernel {
      ro %o[%zero for %size] : !state{%size},
      ro %g[%zero for %size] : !given{%size},
      wo %n[%zero for %size] : !state{%size}
    }
    stream.cmd.copy %n[%zero], %k[%zero], %size : !state{%size} -> !state{%size}
  } => !stream.timepoint
  // CHECK-NOT: util.global.store {{.+}}, @a
  // CHECK: util.global.store [[KEPT]], @b
  // CHECK-NOT: util.global.store {{.+}}, @a
  // CHECK: util.global.store [[DONE]], @ready
  util.global.store %new, @a : !state
  util.global.store %kept, @b : !state
  util.global.store %done, @ready : !stream.timepoint
  util.return
}

util.func public @g(%memory: !given) {
  %zero = arith.constant 0 : index
  %size = arith.constant 256 : index
  %before = util.global.load @ready : !stream.timepoint
  %b = util.global.load @b : !state
  %read = stream.cmd.execute await(%before) => with(%b as %x: !state{%size},
      %memory as %m: !given{%size}) {
    stream.cmd.copy %x[%zero], %m[%zero], %size : !state{%size} -> !given{%size}
  } => !stream.timepoint
  util.return
}
