// Branches that pass each reference once stay as they are. So do calls that pass one twice.
// RUN: irongrad opt %s --pass separate-branch-operands
// UNCHANGED

vm.module @m {
  vm.import private @used(%a: !vm.ref<!hal.buffer>, %b: !vm.ref<!hal.buffer>)
  vm.func @f(%a: !vm.ref<!hal.buffer>, %b: !vm.ref<!hal.buffer>) -> !vm.ref<!hal.buffer> {
    // CHECK: vm.call @used
    vm.call @used(%a, %a) : (!vm.ref<!hal.buffer>, !vm.ref<!hal.buffer>) -> ()
    // CHECK-NEXT: vm.br
    vm.br ^end(%a, %b : !vm.ref<!hal.buffer>, !vm.ref<!hal.buffer>)
  ^end(%x: !vm.ref<!hal.buffer>, %y: !vm.ref<!hal.buffer>):
    vm.return %y : !vm.ref<!hal.buffer>
  }
}
