#define _GNU_SOURCE /* SCHED_BATCH */
#include "module.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "dtype.h"
#include "error.h"
#include "files.h"
#include "interpreter.h"
#include "iree/base/internal/cpu.h"
#include "iree/base/tooling/flags.h"
#include "iree/hal/drivers/init.h"
#include "iree/io/formats/parser_registry.h"
#include "iree/io/parameter_index_provider.h"
#include "iree/modules/hal/types.h"
#include "iree/modules/io/parameters/module.h"
#include "json.h"

static const char initial_state[] = "state.irpa";

struct ig_module {
  ig_bytes code; /* IREE reads it as long as the session lives */
  iree_runtime_session_t *session;
  bool has_workers; /* other threads compute, while the one that calls waits */
};

static bool ready, keeps_64_bits;

/* All modules share one instance: making another would disturb the calls of other threads
 * (irongrad/runtime/vm_instance.py). */
static iree_runtime_instance_t *instance;

static iree_status_t make_instance(void) {
  iree_runtime_instance_options_t options;
  iree_runtime_instance_options_initialize(&options);
  options.driver_registry = iree_hal_driver_registry_default();
  return iree_runtime_instance_create(&options, iree_allocator_system(), &instance);
}

/* IREE gives the workers of local-task 128 KiB of stack; a kernel may need more (irongrad/runtime/stacks.py). */
static void prepare(void) {
  char program[] = "irongrad", flag[] = "--task_worker_stack_size=2097152"; /* IREE writes into them */
  char *arguments[] = {program, flag, NULL}, **given = arguments;
  int count = 2;
  ready = iree_status_is_ok(iree_flags_parse(IREE_FLAGS_PARSE_MODE_DEFAULT, &count, &given)) &&
          iree_status_is_ok(iree_hal_register_all_available_drivers(iree_hal_driver_registry_default()));
  iree_cpu_initialize(iree_allocator_system());
  keeps_64_bits = ig_interpreter_keeps_64_bits();
  ready = ready && iree_status_is_ok(make_instance());
}

static bool is_local(const char *device) {
  return strcmp(device, "local-task") == 0 || strcmp(device, "local-sync") == 0;
}

/* Refuse a file that would stop with an illegal instruction, or that is for no CPU. */
static irongrad_status check_target(const char *directory, const cJSON *target) {
  const char *file = ig_json_text(target, "file"), *device = ig_json_text(target, "device");
  const char *architecture = ig_json_text(target, "architecture");
  const cJSON *feature;
  struct utsname machine;
  if (!file || strchr(file, '/') || !device || !architecture) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, "the manifest of %s is damaged", directory);
  }
  if (!is_local(device)) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s/%s runs on the device %s, and the C library runs on CPUs", directory,
                   file, device);
  }
  if (*architecture && uname(&machine) == 0 && strcmp(machine.machine, architecture) != 0) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s/%s is compiled for %s, this machine is %s", directory, file,
                   architecture, machine.machine);
  }
  cJSON_ArrayForEach(feature, cJSON_GetObjectItemCaseSensitive(target, "features")) {
    const char *name = cJSON_GetStringValue(feature);
    int64_t has = 1;
    if (!name) continue;
    /* IREE does not know features that no kernel uses. */
    iree_status_ignore(iree_cpu_lookup_data_by_key(iree_make_cstring_view(name), &has));
    if (!has) {
      return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s/%s needs the CPU feature %s, which this machine lacks", directory,
                     file, name);
    }
  }
  return IRONGRAD_OK;
}

/* Choose the target called `name`, or the first that can run here. */
static irongrad_status choose_target(const char *directory, const ig_manifest *manifest, const char *name,
                                     const cJSON **chosen) {
  const cJSON *target;
  irongrad_status status = ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s has no target %s", directory, name ? name : "");
  cJSON_ArrayForEach(target, cJSON_GetObjectItemCaseSensitive(manifest->json, "targets")) {
    const char *own = ig_json_text(target, "name");
    if (name && (!own || strcmp(own, name) != 0)) continue;
    status = check_target(directory, target);
    *chosen = target;
    if (status == IRONGRAD_OK) break;
  }
  return status;
}

/* Compare the sha256 and the size of a file with what the manifest says. */
static irongrad_status compare(const char *path, const char *hex, size_t size, const cJSON *expected) {
  const char *sha256 = ig_json_text(expected, "sha256");
  uint64_t length = 0;
  if (sha256 && strcmp(sha256, hex) == 0 &&
      ig_json_whole(cJSON_GetObjectItemCaseSensitive(expected, "size"), &length) && length == size) {
    return IRONGRAD_OK;
  }
  return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s differs from its sha256 in the manifest. Copy it or compile it again",
                 path);
}

static const cJSON *file_spec(const ig_manifest *manifest, const char *name) {
  return cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(manifest->json, "files"), name);
}

static irongrad_status read_code(const char *directory, const ig_manifest *manifest, const char *name,
                                 ig_bytes *code) {
  char hex[IG_SHA256_HEX];
  char *path = ig_join_path(directory, name);
  if (!path) return ig_fail_memory();
  irongrad_status status = ig_read_file(path, code);
  if (status == IRONGRAD_OK && !ig_sha256_end(ig_sha256_add(ig_sha256_begin(), code->data, code->size), hex)) {
    status = ig_fail_memory();
  }
  if (status == IRONGRAD_OK) status = compare(path, hex, code->size, file_spec(manifest, name));
  free(path);
  return status;
}

/* Add the tensors of a parameter file to an index. IREE keeps the file open. */
static iree_status_t add_file(iree_io_parameter_index_t *index, const char *path) {
  const iree_allocator_t allocator = iree_allocator_system();
  const iree_string_view_t name = iree_make_cstring_view(path);
  iree_io_file_handle_t *file = NULL;
  IREE_RETURN_IF_ERROR(iree_io_file_handle_open(
      IREE_IO_FILE_MODE_READ | IREE_IO_FILE_MODE_SHARE_READ | IREE_IO_FILE_MODE_ASYNC, name, allocator, &file));
  iree_status_t status = iree_io_parse_file_index(name, file, index, allocator);
  iree_io_file_handle_release(file);
  return status;
}

/* Make a provider of the tensors of a file, of none if `path` is NULL. */
static iree_status_t make_provider(const char *scope, const char *path, iree_io_parameter_provider_t **provider) {
  const iree_allocator_t allocator = iree_allocator_system();
  iree_io_parameter_index_t *index = NULL;
  IREE_RETURN_IF_ERROR(iree_io_parameter_index_create(allocator, &index));
  iree_status_t status = path ? add_file(index, path) : iree_ok_status();
  if (iree_status_is_ok(status)) {
    status = iree_io_parameter_index_provider_create(
        iree_make_cstring_view(scope), index, IREE_IO_PARAMETER_INDEX_PROVIDER_DEFAULT_MAX_CONCURRENT_OPERATIONS,
        allocator, provider);
  }
  iree_io_parameter_index_release(index);
  return status;
}

/* Append the module through which the compiled one reads its initial state. */
static iree_status_t append_parameters(ig_module *module, const char *state, const char *base) {
  iree_io_parameter_provider_t *providers[2] = {NULL, NULL};
  iree_vm_module_t *parameters = NULL;
  iree_status_t status = make_provider("state", state, &providers[0]);
  if (iree_status_is_ok(status)) status = make_provider("base", base, &providers[1]);
  if (iree_status_is_ok(status)) {
    status = iree_io_parameters_module_create(iree_runtime_instance_vm_instance(instance), 2, providers,
                                              iree_allocator_system(), &parameters);
  }
  if (iree_status_is_ok(status)) status = iree_runtime_session_append_module(module->session, parameters);
  iree_vm_module_release(parameters);
  for (int i = 0; i < 2; ++i) iree_io_parameter_provider_release(providers[i]);
  return status;
}

static iree_status_t start(ig_module *module, const char *device_name, const char *state, const char *base) {
  const iree_allocator_t allocator = iree_allocator_system();
  iree_runtime_session_options_t session_options;
  iree_hal_device_t *device = NULL;
  module->has_workers = strcmp(device_name, "local-task") == 0;
  iree_runtime_session_options_initialize(&session_options);
  IREE_RETURN_IF_ERROR(
      iree_runtime_instance_try_create_default_device(instance, iree_make_cstring_view(device_name), &device));
  iree_status_t status =
      iree_runtime_session_create_with_device(instance, &session_options, device, allocator, &module->session);
  iree_hal_device_release(device);
  IREE_RETURN_IF_ERROR(status);
  IREE_RETURN_IF_ERROR(append_parameters(module, state, base));
  return iree_runtime_session_append_bytecode_module_from_memory(
      module->session, iree_make_const_byte_span(module->code.data, module->code.size), iree_allocator_null());
}

/* Check a file against its sha256. */
static irongrad_status check_file(const char *path, const cJSON *spec) {
  char hex[IG_SHA256_HEX];
  size_t size = 0;
  irongrad_status status = ig_hash_file(path, hex, &size);
  return status == IRONGRAD_OK ? compare(path, hex, size, spec) : status;
}

/* Find the base file, which several artifacts share; `*base` is NULL if the artifact has none. */
static irongrad_status find_base(const char *directory, const ig_manifest *manifest, const char *given, char **base) {
  const cJSON *spec = cJSON_GetObjectItemCaseSensitive(manifest->json, "base_file");
  const char *path = ig_json_text(spec, "path");
  *base = NULL;
  if (!path) {
    return given ? ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s holds all of its state, so it takes no base", directory)
                 : IRONGRAD_OK;
  }
  *base = given ? strdup(given) : ig_join_path(directory, path);
  return *base ? check_file(*base, spec) : ig_fail_memory();
}

static irongrad_status load(const char *directory, const ig_manifest *manifest, const irongrad_options *options,
                            ig_module *module) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  const cJSON *target = NULL;
  char *state = NULL, *base = NULL;
  char reason[1024];
  pthread_once(&once, prepare);
  if (!ready) return ig_fail(IRONGRAD_ARTIFACT_ERROR, "IREE cannot start: its drivers or its instance cannot be made");
  if (!keeps_64_bits) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, "this build of IREE loses the upper half of 64-bit values in calls "
                   "(iree-org/iree#24929), so every step would be wrong. Build the library with IREE 3.13.0 or later");
  }
  irongrad_status status = choose_target(directory, manifest, options->target, &target);
  if (status != IRONGRAD_OK) return status;
  const char *device = options->device ? options->device : ig_json_text(target, "device");
  if (!is_local(device)) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, "the device %s is neither local-task nor local-sync", device);
  }
  state = ig_join_path(directory, initial_state);
  status = state ? check_file(state, file_spec(manifest, initial_state)) : ig_fail_memory();
  if (status == IRONGRAD_OK) status = read_code(directory, manifest, ig_json_text(target, "file"), &module->code);
  if (status == IRONGRAD_OK) status = find_base(directory, manifest, options->base, &base);
  if (status == IRONGRAD_OK) {
    iree_status_t started = start(module, device, state, base);
    if (!iree_status_is_ok(started)) {
      ig_reason(started, reason, sizeof reason);
      status = ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s/%s does not load on %s: %s", directory,
                       ig_json_text(target, "file"), device, reason);
    }
  }
  free(state);
  free(base);
  return status;
}

irongrad_status ig_module_load(const char *directory, const ig_manifest *manifest, const irongrad_options *options,
                               ig_module **module) {
  *module = calloc(1, sizeof **module);
  if (!*module) return ig_fail_memory();
  const irongrad_status status = load(directory, manifest, options, *module);
  if (status != IRONGRAD_OK) {
    ig_module_free(*module);
    *module = NULL;
  }
  return status;
}

void ig_module_free(ig_module *module) {
  if (!module) return;
  iree_runtime_session_release(module->session);
  free(module->code.data);
  free(module);
}

iree_status_t ig_module_push(ig_module *module, iree_vm_list_t *arguments, irongrad_dtype dtype, const void *data,
                             size_t rank, const int64_t *shape) {
  const ig_dtype *type = ig_dtype_of(dtype);
  const iree_hal_buffer_params_t params = {
      .type = IREE_HAL_MEMORY_TYPE_DEVICE_LOCAL,
      .access = IREE_HAL_MEMORY_ACCESS_ALL,
      .usage = IREE_HAL_BUFFER_USAGE_DEFAULT,
  };
  iree_hal_dim_t sizes[IRONGRAD_MAX_RANK];
  iree_hal_buffer_view_t *view = NULL;
  size_t bytes = type->size;
  for (size_t i = 0; i < rank; ++i) {
    sizes[i] = (iree_hal_dim_t)shape[i];
    bytes *= (size_t)shape[i];
  }
  IREE_RETURN_IF_ERROR(iree_hal_buffer_view_allocate_buffer_copy(
      iree_runtime_session_device(module->session), iree_runtime_session_device_allocator(module->session), rank,
      sizes, type->element, IREE_HAL_ENCODING_TYPE_DENSE_ROW_MAJOR, params, iree_make_const_byte_span(data, bytes),
      &view));
  iree_vm_ref_t reference = iree_hal_buffer_view_move_ref(view);
  iree_status_t status = iree_vm_list_push_ref_move(arguments, &reference);
  iree_vm_ref_release(&reference);
  return status;
}

static bool take_policy(int policy) {
  const struct sched_param usual = {.sched_priority = 0};
  return sched_setscheduler(0, policy, &usual) == 0;
}

/* The thread that waits for the workers does not run in place of one (irongrad/runtime/calls.py). */
static iree_status_t invoke(ig_module *module, const iree_vm_function_t *function, iree_vm_list_t *arguments,
                            iree_vm_list_t *results) {
  bool changed = false;
#ifdef SCHED_BATCH
  changed = module->has_workers && sched_getscheduler(0) == SCHED_OTHER && take_policy(SCHED_BATCH);
#endif
  iree_status_t status = iree_runtime_session_call(module->session, function, arguments, results);
  if (changed) take_policy(SCHED_OTHER);
  return status;
}

static iree_status_t run(ig_module *module, const char *symbol, iree_vm_list_t *arguments, iree_vm_list_t **results,
                         size_t result_count) {
  iree_vm_function_t function;
  char name[256];
  snprintf(name, sizeof name, "irongrad.%s", symbol);
  IREE_RETURN_IF_ERROR(iree_vm_list_create(iree_vm_make_undefined_type_def(), result_count, iree_allocator_system(),
                                           results));
  IREE_RETURN_IF_ERROR(
      iree_runtime_session_lookup_function(module->session, iree_make_cstring_view(name), &function));
  return invoke(module, &function, arguments, *results);
}

irongrad_status ig_module_run(ig_module *module, const ig_entry *entry, iree_vm_list_t *arguments,
                              iree_vm_list_t **results) {
  char reason[1024];
  iree_status_t status = run(module, entry->symbol, arguments, results, entry->output_count);
  if (iree_status_is_ok(status)) return IRONGRAD_OK;
  ig_reason(status, reason, sizeof reason);
  return ig_fail(IRONGRAD_GUARD_ERROR, "%s: %s", entry->symbol, reason);
}

static iree_hal_buffer_view_t *result_view(iree_vm_list_t *results, size_t index) {
  return iree_vm_list_get_buffer_view_assign(results, index);
}

size_t ig_module_result_size(iree_vm_list_t *results, size_t index) {
  iree_hal_buffer_view_t *view = result_view(results, index);
  return view ? (size_t)iree_hal_buffer_view_byte_length(view) : 0;
}

irongrad_status ig_module_copy_result(ig_module *module, iree_vm_list_t *results, size_t index, void *data) {
  char reason[1024];
  iree_hal_buffer_view_t *view = result_view(results, index);
  const size_t size = ig_module_result_size(results, index);
  if (size == 0) return IRONGRAD_OK;
  iree_status_t status = iree_hal_device_transfer_d2h(
      iree_runtime_session_device(module->session), iree_hal_buffer_view_buffer(view), 0, data, size,
      IREE_HAL_TRANSFER_BUFFER_FLAG_DEFAULT, iree_infinite_timeout());
  if (iree_status_is_ok(status)) return IRONGRAD_OK;
  ig_reason(status, reason, sizeof reason);
  return ig_fail(IRONGRAD_ARTIFACT_ERROR, "a result cannot be copied from the device: %s", reason);
}
