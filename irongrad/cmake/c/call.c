#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "error.h"
#include "json.h"
#include "session.h"

/* A call that is being prepared. `given` has a place for each input and then each hyperparameter. */
typedef struct ig_call {
  const ig_manifest *manifest;
  const ig_entry *entry;
  const irongrad_argument **given;
  size_t *asked; /* for each result that the caller asks for, its place among the entry point's */
} ig_call;

/* Refuse an argument or a result, with the signature. */
__attribute__((format(printf, 2, 3))) static irongrad_status refuse(const ig_entry *entry, const char *format, ...) {
  char *text = NULL;
  size_t size = 0;
  va_list arguments;
  FILE *out = open_memstream(&text, &size);
  if (!out) return ig_fail_memory();
  va_start(arguments, format);
  vfprintf(out, format, arguments);
  va_end(arguments);
  fputs("; expected ", out);
  ig_print_signature(out, entry);
  fclose(out);
  const irongrad_status status = ig_fail(IRONGRAD_GUARD_ERROR, "%s", text ? text : "");
  free(text);
  return status;
}

static const char *hyper_name(const ig_entry *entry, size_t index) {
  return cJSON_GetStringValue(cJSON_GetArrayItem(entry->hypers, (int)index));
}

static const char *name_of(const ig_entry *entry, size_t place) {
  return place < entry->input_count ? entry->inputs[place].name : hyper_name(entry, place - entry->input_count);
}

/* Find the place of an argument; the number of places if it has none. */
static size_t place_of(const ig_call *call, const char *name) {
  const size_t count = call->entry->input_count + call->entry->hyper_count;
  for (size_t i = 0; i < count; ++i) {
    if (name ? strcmp(name_of(call->entry, i), name) == 0 : !call->given[i]) return i;
  }
  return count;
}

static irongrad_status check_argument(const ig_entry *entry, const irongrad_argument *argument, size_t place) {
  const char *name = name_of(entry, place);
  size_t elements = 1;
  if (!ig_dtype_of(argument->dtype)) return refuse(entry, "%s: %s has no dtype", entry->symbol, name);
  if (argument->rank > IRONGRAD_MAX_RANK) return refuse(entry, "%s: %s has too many dimensions", entry->symbol, name);
  for (size_t i = 0; i < argument->rank; ++i) {
    if (argument->shape[i] < 0 || (argument->shape[i] > 0 && elements > (SIZE_MAX >> 4) / (size_t)argument->shape[i])) {
      return refuse(entry, "%s: %s has no size of %lld", entry->symbol, name, (long long)argument->shape[i]);
    }
    elements *= (size_t)argument->shape[i];
  }
  if (!argument->data && elements > 0) return refuse(entry, "%s: %s has no data", entry->symbol, name);
  if (place < entry->input_count) return IRONGRAD_OK;
  if (argument->dtype != IRONGRAD_FLOAT64 || argument->rank > (entry->stacked ? 1 : 0)) {
    return refuse(entry, "%s: %s must be a float64 number%s", entry->symbol, name,
                  entry->stacked ? ", or one for each step" : "");
  }
  return IRONGRAD_OK;
}

static irongrad_status take_arguments(ig_call *call, const irongrad_argument *arguments, size_t count) {
  const ig_entry *entry = call->entry;
  for (size_t i = 0; i < count; ++i) {
    const size_t place = place_of(call, arguments[i].name);
    if (place == entry->input_count + entry->hyper_count) {
      if (!arguments[i].name) return refuse(entry, "%s: %zu arguments are too many", entry->symbol, count);
      return refuse(entry, "%s takes no argument '%s'", entry->symbol, arguments[i].name);
    }
    if (call->given[place]) return refuse(entry, "%s: '%s' is given twice", entry->symbol, arguments[i].name);
    const irongrad_status status = check_argument(entry, &arguments[i], place);
    if (status != IRONGRAD_OK) return status;
    call->given[place] = &arguments[i];
  }
  for (size_t i = 0; i < entry->input_count; ++i) {
    if (!call->given[i]) return refuse(entry, "%s: the input '%s' is missing", entry->symbol, name_of(entry, i));
  }
  return IRONGRAD_OK;
}

/* The size of a dimension that varies, if an input has it; false otherwise. */
static bool find_size(const ig_call *call, const char *dimension, size_t *size) {
  for (size_t i = 0; i < call->entry->input_count; ++i) {
    const cJSON *shape = call->entry->inputs[i].shape;
    for (size_t d = 0; d < call->given[i]->rank; ++d) {
      const char *name = cJSON_GetStringValue(cJSON_GetArrayItem(shape, (int)d));
      if (!name || strcmp(name, dimension) != 0) continue;
      *size = (size_t)call->given[i]->shape[d];
      return true;
    }
  }
  return false;
}

/* The number of elements that a result will have; false if only the call itself tells. */
static bool find_count(const ig_call *call, const ig_tensor *result, size_t *count) {
  const cJSON *dimension;
  *count = 1;
  cJSON_ArrayForEach(dimension, result->shape) {
    size_t size = (size_t)dimension->valuedouble;
    if (cJSON_IsString(dimension) && !find_size(call, dimension->valuestring, &size)) return false;
    *count *= size;
  }
  return true;
}

static irongrad_status check_results(ig_call *call, const irongrad_result *results, size_t count) {
  const ig_entry *entry = call->entry;
  for (size_t i = 0; i < count; ++i) {
    size_t place = 0, elements;
    const char *name = results[i].name ? results[i].name : "";
    while (place < entry->output_count && strcmp(entry->outputs[place].name, name) != 0) ++place;
    if (place == entry->output_count) return refuse(entry, "%s has no result '%s'", entry->symbol, name);
    const ig_tensor *output = &entry->outputs[place];
    if (results[i].dtype != output->dtype) {
      return refuse(entry, "%s: the result '%s' is %s", entry->symbol, name, ig_dtype_of(output->dtype)->name);
    }
    if (!results[i].data || (find_count(call, output, &elements) && elements != results[i].count)) {
      return refuse(entry, "%s: the place for the result '%s' has another number of elements", entry->symbol, name);
    }
    call->asked[i] = place;
  }
  return IRONGRAD_OK;
}

static irongrad_status check_hyper(const ig_call *call, const char *name, const double *values, size_t count) {
  const bool infinite = ig_manifest_may_be_infinite(call->manifest, name);
  for (size_t i = 0; i < count; ++i) {
    if (isnan(values[i]) || (isinf(values[i]) && !infinite)) {
      return refuse(call->entry, "%s: %s is %g: it must be finite", call->entry->symbol, name, values[i]);
    }
  }
  return IRONGRAD_OK;
}

static irongrad_status pushed(const ig_call *call, const char *name, iree_status_t status) {
  char reason[1024];
  if (iree_status_is_ok(status)) return IRONGRAD_OK;
  ig_reason(status, reason, sizeof reason);
  return refuse(call->entry, "%s: %s cannot be copied to the device: %s", call->entry->symbol, name, reason);
}

/* Append one number for each of `steps` steps. */
static iree_status_t push_repeated(ig_module *module, iree_vm_list_t *list, double value, int64_t steps) {
  double *values = malloc(((size_t)steps + 1) * sizeof *values);
  if (!values) return iree_make_status(IREE_STATUS_RESOURCE_EXHAUSTED);
  for (int64_t i = 0; i < steps; ++i) values[i] = value;
  iree_status_t status = ig_module_push(module, list, IRONGRAD_FLOAT64, values, 1, &steps);
  free(values);
  return status;
}

static irongrad_status push_hyper(const ig_call *call, ig_module *module, size_t index, iree_vm_list_t *list) {
  const irongrad_argument *given = call->given[call->entry->input_count + index];
  const char *name = hyper_name(call->entry, index);
  const bool array = given && given->rank == 1;
  double value = 0;
  if (given && !array) memcpy(&value, given->data, sizeof value);
  if (!given && !ig_manifest_default(call->manifest, name, &value)) {
    return refuse(call->entry, "%s: %s has no default, so it must be given", call->entry->symbol, name);
  }
  irongrad_status status = array ? check_hyper(call, name, given->data, (size_t)given->shape[0])
                                 : check_hyper(call, name, &value, 1);
  if (status != IRONGRAD_OK) return status;
  if (array) return pushed(call, name, ig_module_push(module, list, given->dtype, given->data, 1, given->shape));
  if (call->entry->stacked) {
    const irongrad_argument *first = call->entry->input_count ? call->given[0] : NULL;
    return pushed(call, name, push_repeated(module, list, value, first && first->rank ? first->shape[0] : 0));
  }
  const iree_vm_value_t number = iree_vm_value_make_f64(value);
  return pushed(call, name, iree_vm_list_push_value(list, &number));
}

static irongrad_status push_all(const ig_call *call, ig_module *module, iree_vm_list_t *list) {
  irongrad_status status = IRONGRAD_OK;
  for (size_t i = 0; i < call->entry->input_count && status == IRONGRAD_OK; ++i) {
    const irongrad_argument *given = call->given[i];
    status = pushed(call, name_of(call->entry, i),
                    ig_module_push(module, list, given->dtype, given->data, given->rank, given->shape));
  }
  for (size_t i = 0; i < call->entry->hyper_count && status == IRONGRAD_OK; ++i) {
    status = push_hyper(call, module, i, list);
  }
  return status;
}

/* Copy the results that are asked for. A size that only the call tells is compared here. */
static irongrad_status copy_results(const ig_call *call, ig_module *module, iree_vm_list_t *values,
                                    const irongrad_result *results, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const size_t size = ig_module_result_size(values, call->asked[i]);
    const size_t elements = size / ig_dtype_of(results[i].dtype)->size;
    if (elements != results[i].count) {
      return refuse(call->entry, "%s: the call has run, but its result '%s' has %zu elements, not %zu",
                    call->entry->symbol, results[i].name, elements, results[i].count);
    }
    const irongrad_status status = ig_module_copy_result(module, values, call->asked[i], results[i].data);
    if (status != IRONGRAD_OK) return status;
  }
  return IRONGRAD_OK;
}

static irongrad_status run(const ig_call *call, ig_module *module, const irongrad_result *results, size_t count) {
  iree_vm_list_t *list = NULL, *values = NULL;
  const size_t arguments = call->entry->input_count + call->entry->hyper_count;
  iree_status_t created =
      iree_vm_list_create(iree_vm_make_undefined_type_def(), arguments, iree_allocator_system(), &list);
  if (!iree_status_is_ok(created)) {
    iree_status_free(created);
    return ig_fail_memory();
  }
  irongrad_status status = push_all(call, module, list);
  if (status == IRONGRAD_OK) {
    status = ig_module_run(module, call->entry, list, &values);
    if (status == IRONGRAD_GUARD_ERROR) status = refuse(call->entry, "%s", irongrad_error_message());
  }
  if (status == IRONGRAD_OK) status = copy_results(call, module, values, results, count);
  iree_vm_list_release(values);
  iree_vm_list_release(list);
  return status;
}

irongrad_status irongrad_call(irongrad_session *session, const char *entry_point, const irongrad_argument *arguments,
                              size_t argument_count, const irongrad_result *results, size_t result_count) {
  ig_call call = {.manifest = &session->manifest, .entry = ig_manifest_entry(&session->manifest, entry_point)};
  if (!call.entry) {
    return ig_fail(IRONGRAD_GUARD_ERROR, "the artifact has no entry point '%s'; `irongrad inspect` lists its own",
                   entry_point);
  }
  call.given = calloc(call.entry->input_count + call.entry->hyper_count + 1, sizeof *call.given);
  call.asked = calloc(result_count + 1, sizeof *call.asked);
  irongrad_status status = call.given && call.asked ? IRONGRAD_OK : ig_fail_memory();
  if (status == IRONGRAD_OK) status = take_arguments(&call, arguments, argument_count);
  if (status == IRONGRAD_OK) status = check_results(&call, results, result_count);
  if (status == IRONGRAD_OK) {
    pthread_mutex_lock(&session->lock);
    status = run(&call, session->module, results, result_count);
    pthread_mutex_unlock(&session->lock);
  }
  free(call.given);
  free(call.asked);
  return status;
}
