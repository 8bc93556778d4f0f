// Kernels with equal computations on parts at different offsets become one.
// RUN: irongrad opt %s --pass share-kernels

// CHECK: flow.executable private @a {
// CHECK: func.func @a({{.+}}, [[BEGIN:%.+]]: index, {{.+}}) {
// CHECK-NEXT: [[PART:%.+]] = iree_tensor_ext.dispatch.tensor.load {{.+}}, offsets = {{\[}}[[BEGIN]]]
// CHECK-NEXT: arith.negf [[PART]]
// CHECK-NOT: flow.executable private
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
flow.executable private @b {
  flow.executable.export public @b
  builtin.module {
    func.func @b(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>>,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>) {
      %part = iree_tensor_ext.dispatch.tensor.load %from, offsets = [3], sizes = [5], strides = [1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>> -> tensor<5xf32>
      %value = arith.negf %part : tensor<5xf32>
      iree_tensor_ext.dispatch.tensor.store %value, %to, offsets = [0], sizes = [5], strides = [1]
          : tensor<5xf32> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>
      return
    }
  }
}
