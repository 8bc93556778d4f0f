#include "interpreter.h"

#include "iree/runtime/api.h"
#include "iree/vm/bytecode/assembler/assembler.h"
#include "iree/vm/bytecode/module.h"

/* `call` returns its second argument, by way of another function. */
static const char source[] =
    "vm.module @probe version 0\n"
    "vm.type i64\n"
    "vm.export @call\n"
    "vm.func @call(%i0:1: i64, %i2:3: i64) -> (i64) {\n"
    "^bb0:\n"
    "  %i4:5 = vm.call @probe:1(%i0:1, %i2:3)\n"
    "  vm.return %i4:5\n"
    "}\n"
    "vm.func @second(%i0:1: i64, %i2:3: i64) -> (i64) {\n"
    "^bb0:\n"
    "  vm.return %i2:3\n"
    "}\n";

static iree_status_t call(iree_vm_context_t *context, iree_vm_function_t function, int64_t *result) {
  const iree_allocator_t allocator = iree_allocator_system();
  iree_vm_list_t *arguments = NULL, *results = NULL;
  iree_status_t status = iree_vm_list_create(iree_vm_make_undefined_type_def(), 2, allocator, &arguments);
  if (iree_status_is_ok(status)) {
    status = iree_vm_list_create(iree_vm_make_undefined_type_def(), 1, allocator, &results);
  }
  for (int i = 0; i < 2 && iree_status_is_ok(status); ++i) {
    const iree_vm_value_t value = iree_vm_value_make_i64(i ? *result : ~*result);
    status = iree_vm_list_push_value(arguments, &value);
  }
  *result = 0;
  iree_vm_value_t returned;
  if (iree_status_is_ok(status)) {
    status = iree_vm_invoke(context, function, IREE_VM_INVOCATION_FLAG_NONE, NULL, arguments, results, allocator);
  }
  if (iree_status_is_ok(status)) status = iree_vm_list_get_value(results, 0, &returned);
  if (iree_status_is_ok(status)) *result = returned.i64;
  iree_vm_list_release(results);
  iree_vm_list_release(arguments);
  return status;
}

static iree_status_t call_in(iree_vm_instance_t *instance, iree_byte_span_t archive, int64_t *result) {
  const iree_allocator_t allocator = iree_allocator_system();
  iree_vm_module_t *module = NULL;
  iree_vm_context_t *context = NULL;
  iree_vm_function_t function;
  IREE_RETURN_IF_ERROR(iree_vm_bytecode_module_create(
      instance, IREE_VM_BYTECODE_MODULE_FLAG_NONE, iree_make_const_byte_span(archive.data, archive.data_length),
      iree_allocator_null(), allocator, &module));
  iree_status_t status = iree_vm_context_create_with_modules(instance, IREE_VM_CONTEXT_FLAG_NONE, 1, &module,
                                                             allocator, &context);
  if (iree_status_is_ok(status)) {
    status = iree_vm_context_resolve_function(context, iree_make_cstring_view("probe.call"), &function);
  }
  if (iree_status_is_ok(status)) status = call(context, function, result);
  iree_vm_context_release(context);
  iree_vm_module_release(module);
  return status;
}

bool ig_interpreter_keeps_64_bits(void) {
  const iree_allocator_t allocator = iree_allocator_system();
  const int64_t value = 0x0123456789abcdef;
  iree_vm_instance_t *instance = NULL;
  iree_byte_span_t archive = iree_make_byte_span(NULL, 0);
  int64_t result = value;
  iree_status_t status = iree_vm_instance_create(IREE_VM_TYPE_CAPACITY_DEFAULT, allocator, &instance);
  if (iree_status_is_ok(status)) {
    status = iree_vm_bytecode_assembler_assemble(iree_make_cstring_view(source), allocator, &archive);
  }
  if (iree_status_is_ok(status)) status = call_in(instance, archive, &result);
  iree_allocator_free(allocator, archive.data);
  iree_vm_instance_release(instance);
  return iree_status_consume_code(status) == IREE_STATUS_OK && result == value;
}
