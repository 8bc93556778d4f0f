// Kernels with different computations stay apart, even if they read the same parts.
// RUN: irongrad opt %s --pass share-kernels
// UNCHANGED

// CHECK: flow.executable private @a
flow.executable private @a {
  flow.executable.export public @a
  builtin.module {
    func.func @a(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>>,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>) {
      %part = iree_tensor_ext.dispatch.tensor.load %from, offsets = [1], sizes = [5], strides = [1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>> -> tensor<5xf32>
      %value = arith.negf %part : tensor<5xf32>
      iree_tensor_ext.dispatch.tensor.store %value, %to, offsets = [0], sizes = [5], strides = [1]
          : tensor<5xf32> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>
      return
    }
  }
}
// CHECK: flow.executable private @b
flow.executable private @b {
  flow.executable.export public @b
  builtin.module {
    func.func @b(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>>,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>) {
      %part = iree_tensor_ext.dispatch.tensor.load %from, offsets = [3], sizes = [5], strides = [1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>> -> tensor<5xf32>
      iree_tensor_ext.dispatch.tensor.store %part, %to, offsets = [0], sizes = [5], strides = [1]
          : tensor<5xf32> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>
      return
    }
  }
}
