// A branch passes one reference twice, so the second gets a value of its own. Numbers may be passed twice.
// RUN: irongrad opt %s --pass separate-branch-operands

vm.module @m {
  // CHECK: vm.func @f([[A:%.+]]: !vm.ref<!hal.buffer>, [[N:%.+]]: i32)
  vm.func @f(%a: !vm.ref<!hal.buffer>, %n: i32) -> !vm.ref<!hal.buffer> {
    // CHECK-NEXT: [[GIVEN:%.+]] = vm.cmp.nz.ref [[A]]
    // CHECK-NEXT: [[NULL:%.+]] = vm.const.ref.zero
    // CHECK-NEXT: [[ANOTHER:%.+]] = vm.select.ref [[GIVEN]], [[A]], [[NULL]]
    // CHECK-NEXT: vm.br ^[[LOOP:bb.+]]([[A]], [[N]], [[ANOTHER]], [[N]] :
    vm.br ^loop(%a, %n, %a, %n : !vm.ref<!hal.buffer>, i32, !vm.ref<!hal.buffer>, i32)
  // CHECK-NEXT: ^[[LOOP]]([[X:%.+]]: {{.+}}, [[I:%.+]]: i32, %{{.+}}: {{.+}}, [[J:%.+]]: i32):
  ^loop(%x: !vm.ref<!hal.buffer>, %i: i32, %y: !vm.ref<!hal.buffer>, %j: i32):
    // CHECK-NEXT: [[GIVEN:%.+]] = vm.cmp.nz.ref [[X]]
    // CHECK-NEXT: [[NULL:%.+]] = vm.const.ref.zero
    // CHECK-NEXT: [[ANOTHER:%.+]] = vm.select.ref [[GIVEN]], [[X]], [[NULL]]
    // CHECK-NEXT: vm.cond_br [[I]], ^[[LOOP]]([[X]], [[J]], [[ANOTHER]], [[J]] :
    vm.cond_br %i, ^loop(%x, %j, %x, %j : !vm.ref<!hal.buffer>, i32, !vm.ref<!hal.buffer>, i32), ^end
  ^end:
    vm.return %y : !vm.ref<!hal.buffer>
  }
}
