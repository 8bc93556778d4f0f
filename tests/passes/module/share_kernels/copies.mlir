// Kernels that read at different offsets become one with the offset as an argument, which comes before the result. A
// second run changes nothing.
// RUN: irongrad opt %s --pass share-kernels
// RUN: irongrad opt %s --pass share-kernels --pass share-kernels

// CHECK: flow.executable private @a {
// CHECK: func.func @a([[FROM:%.+]]: {{.+}}, [[BEGIN:%.+]]: index, [[TO:%.+]]: {{.+}}) {
// CHECK-NEXT: [[PART:%.+]] = iree_tensor_ext.dispatch.tensor.load [[FROM]], offsets = {{\[}}[[BEGIN]]], sizes = [5]
// CHECK-NEXT: iree_tensor_ext.dispatch.tensor.store [[PART]], [[TO]], offsets = [0], sizes = [5]
// CHECK-NEXT: return
// CHECK-NOT: flow.executable private
flow.executable private @a {
  flow.executable.export public @a
  builtin.module {
    func.func @a(%from: !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>>,
        %to: !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>) {
      %part = iree_tensor_ext.dispatch.tensor.load %from, offsets = [1], sizes = [5], strides = [1]
          : !iree_tensor_ext.dispatch.tensor<readonly:tensor<9xf32>> -> tensor<5xf32>
      iree_tensor_ext.dispatch.tensor.store %part, %to, offsets = [0], sizes = [5], strides = [1]
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
      iree_tensor_ext.dispatch.tensor.store %part, %to, offsets = [0], sizes = [5], strides = [1]
          : tensor<5xf32> -> !iree_tensor_ext.dispatch.tensor<writeonly:tensor<5xf32>>
      return
    }
  }
}
// CHECK: util.func public @f([[X:%.+]]: tensor<9xf32>)
util.func public @f(%x: tensor<9xf32>) -> (tensor<5xf32>, tensor<5xf32>) {
  // CHECK-NEXT: [[ONE:%.+]] = arith.constant 1 : index
  // CHECK-NEXT: [[A:%.+]] = flow.dispatch @a::@a([[X]], [[ONE]]) : (tensor<9xf32>, index) -> tensor<5xf32>
  %a = flow.dispatch @a::@a(%x) : (tensor<9xf32>) -> tensor<5xf32>
  // CHECK-NEXT: [[THREE:%.+]] = arith.constant 3 : index
  // CHECK-NEXT: [[B:%.+]] = flow.dispatch @a::@a([[X]], [[THREE]]) : (tensor<9xf32>, index) -> tensor<5xf32>
  %b = flow.dispatch @b::@b(%x) : (tensor<9xf32>) -> tensor<5xf32>
  // CHECK-NEXT: util.return [[A]], [[B]]
  util.return %a, %b : tensor<5xf32>, tensor<5xf32>
}
