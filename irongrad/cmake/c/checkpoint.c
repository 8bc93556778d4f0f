#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "error.h"
#include "json.h"
#include "safetensors.h"
#include "session.h"
#include "sha256.h"

/* The state as `export_state` returned it, copied to the host: one array for each result. */
typedef struct ig_exported {
  const ig_entry *entry;
  iree_vm_list_t *views;
  ig_bytes *arrays;
} ig_exported;

static irongrad_status find_entry(const ig_manifest *manifest, const char *name, const ig_entry **entry) {
  *entry = ig_manifest_entry(manifest, name);
  if (*entry) return IRONGRAD_OK;
  return ig_fail(IRONGRAD_GUARD_ERROR, "the artifact has no entry point '%s'; compile it with one", name);
}

static void free_exported(ig_exported *exported) {
  for (size_t i = 0; exported->arrays && i < exported->entry->output_count; ++i) free(exported->arrays[i].data);
  free(exported->arrays);
  iree_vm_list_release(exported->views);
}

/* Export the state. The caller frees it, also after a failure. */
static irongrad_status export_state(irongrad_session *session, ig_exported *exported) {
  iree_vm_list_t *none = NULL;
  *exported = (ig_exported){0};
  irongrad_status status = find_entry(&session->manifest, "export_state", &exported->entry);
  if (status != IRONGRAD_OK) return status;
  exported->arrays = calloc(exported->entry->output_count + 1, sizeof *exported->arrays);
  if (!exported->arrays) return ig_fail_memory();
  iree_status_t created = iree_vm_list_create(iree_vm_make_undefined_type_def(), 0, iree_allocator_system(), &none);
  if (!iree_status_is_ok(created)) {
    iree_status_free(created);
    return ig_fail_memory();
  }
  status = ig_module_run(session->module, exported->entry, none, &exported->views);
  iree_vm_list_release(none);
  for (size_t i = 0; i < exported->entry->output_count && status == IRONGRAD_OK; ++i) {
    ig_bytes *array = &exported->arrays[i];
    array->size = ig_module_result_size(exported->views, i);
    array->data = malloc(array->size + 1);
    status = array->data ? ig_module_copy_result(session->module, exported->views, i, array->data) : ig_fail_memory();
  }
  return status;
}

/* The exported array of a tensor; NULL if it lies in a base file. */
static const ig_bytes *find_exported(const ig_exported *exported, const char *name) {
  for (size_t i = 0; i < exported->entry->output_count; ++i) {
    if (strcmp(exported->entry->outputs[i].name, name) == 0) return &exported->arrays[i];
  }
  return NULL;
}

/* --- save ------------------------------------------------------------------------------------------------------- */

/* List the tensors of a checkpoint, a tied one under each of its names. The caller frees the list. */
static irongrad_status list_tensors(const ig_manifest *manifest, const ig_exported *exported, irongrad_part part,
                                    ig_stored **tensors, size_t *count) {
  size_t most = 0;
  const cJSON *alias;
  for (size_t i = 0; i < manifest->state_count; ++i) most += 1 + (size_t)cJSON_GetArraySize(manifest->state[i].aliases);
  *count = 0;
  *tensors = calloc(most + 1, sizeof **tensors);
  if (!*tensors) return ig_fail_memory();
  for (size_t i = 0; i < manifest->state_count; ++i) {
    const ig_state *state = &manifest->state[i];
    const ig_tensor *tensor = &state->tensor;
    if (part == IRONGRAD_TRAINABLE_STATE && state->frozen) continue;
    const ig_bytes *array = find_exported(exported, tensor->name);
    if (!array) {
      return ig_fail(IRONGRAD_GUARD_ERROR, "%s lies in the base file, so only the trainable state can be saved",
                     tensor->name);
    }
    const ig_stored stored = {tensor->name, tensor->dtype, tensor->shape, array->data, array->size};
    (*tensors)[(*count)++] = stored;
    cJSON_ArrayForEach(alias, state->aliases) {
      (*tensors)[*count] = stored;
      (*tensors)[(*count)++].name = alias->valuestring;
    }
  }
  return IRONGRAD_OK;
}

static irongrad_status write_checkpoint(const ig_manifest *manifest, const char *path, irongrad_part part,
                                        ig_stored *tensors, size_t count) {
  cJSON *about = cJSON_CreateObject();
  bool said = cJSON_AddStringToObject(about, "format", "irongrad-1") &&
              cJSON_AddStringToObject(about, "artifact", manifest->digest);
  if (part == IRONGRAD_TRAINABLE_STATE) said = said && cJSON_AddStringToObject(about, "base", manifest->base);
  const irongrad_status status = said ? ig_safetensors_write(path, tensors, count, about) : ig_fail_memory();
  cJSON_Delete(about);
  return status;
}

irongrad_status irongrad_save(irongrad_session *session, const char *path, irongrad_part part) {
  ig_exported exported;
  ig_stored *tensors = NULL;
  size_t count = 0;
  pthread_mutex_lock(&session->lock);
  irongrad_status status = export_state(session, &exported);
  pthread_mutex_unlock(&session->lock);
  if (status == IRONGRAD_OK) status = list_tensors(&session->manifest, &exported, part, &tensors, &count);
  if (status == IRONGRAD_OK) status = write_checkpoint(&session->manifest, path, part, tensors, count);
  free(tensors);
  free_exported(&exported);
  return status;
}

/* --- restore ---------------------------------------------------------------------------------------------------- */

/* Lists what is wrong with a checkpoint: the first few problems, and how many more there are. */
typedef struct ig_problems {
  FILE *out;
  size_t count;
} ig_problems;

enum { LISTED = 4 };

__attribute__((format(printf, 2, 3))) static void add_problem(ig_problems *problems, const char *format, ...) {
  va_list arguments;
  if (problems->count++ >= LISTED) return;
  if (problems->count > 1) fputs("; ", problems->out);
  va_start(arguments, format);
  vfprintf(problems->out, format, arguments);
  va_end(arguments);
}

static bool begins(const char *name, const char *prefix) { return strncmp(name, prefix, strlen(prefix)) == 0; }

/* Tensors that are no state of this artifact, but that a checkpoint may hold (irongrad/runtime/checkpoint.py). */
static bool is_passed_over(const ig_manifest *manifest, const char *name) {
  return begins(name, "ema/") || begins(name, "outer/") ||
         (!manifest->updates && (begins(name, "optimizer/") || begins(name, "scaler/")));
}

static bool is_known(const ig_manifest *manifest, const char *name) {
  const cJSON *alias;
  for (size_t i = 0; i < manifest->state_count; ++i) {
    if (strcmp(manifest->state[i].tensor.name, name) == 0) return true;
    cJSON_ArrayForEach(alias, manifest->state[i].aliases) {
      if (strcmp(alias->valuestring, name) == 0) return true;
    }
  }
  return false;
}

static bool has_negative(const ig_stored *tensor) {
  const size_t width = ig_dtype_of(tensor->dtype)->size;
  for (size_t at = 0; at + width <= tensor->size; at += width) {
    int64_t whole;
    double wide;
    float narrow;
    switch (tensor->dtype) {
      case IRONGRAD_INT64:
        memcpy(&whole, tensor->data + at, sizeof whole);
        if (whole < 0) return true;
        break;
      case IRONGRAD_FLOAT64:
        memcpy(&wide, tensor->data + at, sizeof wide);
        if (!(wide >= 0)) return true;
        break;
      case IRONGRAD_FLOAT32:
        memcpy(&narrow, tensor->data + at, sizeof narrow);
        if (!(narrow >= 0)) return true;
        break;
      default:
        break;
    }
  }
  return false;
}

/* Compare a tensor of the file with what the step has. Returns whether it fits. */
static bool fits(const ig_tensor *wanted, const ig_stored *found, ig_problems *problems) {
  char *has = NULL, *needs = NULL;
  if (found->dtype == wanted->dtype && cJSON_Compare(found->shape, wanted->shape, 1)) return true;
  has = cJSON_PrintUnformatted(found->shape);
  needs = cJSON_PrintUnformatted(wanted->shape);
  add_problem(problems, "%s is %s%s, the step has %s%s", found->name, ig_dtype_of(found->dtype)->name, has ? has : "",
              ig_dtype_of(wanted->dtype)->name, needs ? needs : "");
  cJSON_free(has);
  cJSON_free(needs);
  return false;
}

/* Whether a tensor has the values that the step was compiled for; those that may change within bounds, `import_state`
 * checks. */
static bool has_relied_values(const ig_manifest *manifest, const ig_stored *tensor) {
  const cJSON *relied = cJSON_GetObjectItemCaseSensitive(manifest->json, "relied");
  const char *sha256 = ig_json_text(cJSON_GetObjectItemCaseSensitive(relied, tensor->name), "sha256");
  char found[IG_SHA256_HEX];
  if (!sha256 || !*sha256) return true;
  return ig_sha256_end(ig_sha256_add(ig_sha256_begin(), tensor->data, tensor->size), found) &&
         strcmp(found, sha256) == 0;
}

static void compare_state(const ig_manifest *manifest, const ig_state *state, const ig_safetensors *file, bool optional,
                          ig_problems *problems) {
  const ig_stored *found = ig_safetensors_find(file, state->tensor.name);
  const cJSON *alias;
  if (!found) {
    if (!optional) add_problem(problems, "%s is missing", state->tensor.name);
    return;
  }
  if (!fits(&state->tensor, found, problems)) return;
  if (!has_relied_values(manifest, found)) {
    add_problem(problems, "%s has other values than those that the step was compiled for", found->name);
  }
  if (state->counts && has_negative(found)) add_problem(problems, "%s counts, and is below 0", found->name);
  cJSON_ArrayForEach(alias, state->aliases) {
    const ig_stored *other = ig_safetensors_find(file, alias->valuestring);
    if (!other || !fits(&state->tensor, other, problems)) continue;
    if (memcmp(other->data, found->data, found->size) != 0) {
      add_problem(problems, "%s and %s are one tensor in the compiled step, but their values differ", other->name,
                  found->name);
    }
  }
}

/* Whether a file has none of the frozen tensors, as one of the trainable state. */
static bool is_trainable_part(const ig_manifest *manifest, const ig_safetensors *file) {
  for (size_t i = 0; i < manifest->state_count; ++i) {
    const ig_state *state = &manifest->state[i];
    if (state->frozen && ig_safetensors_find(file, state->tensor.name)) return false;
  }
  return true;
}

static irongrad_status check_base(const ig_manifest *manifest, const ig_safetensors *file, const char *path) {
  const char *base = ig_json_text(file->about, "base");
  if (!base || strcmp(base, manifest->base) == 0) return IRONGRAD_OK;
  return ig_fail(IRONGRAD_ARTIFACT_ERROR,
                 "%s was trained on another base: its frozen tensors have the sha256 %s, and those of this artifact %s",
                 path, base, *manifest->base ? manifest->base : "do not exist");
}

static irongrad_status check_fit(const ig_manifest *manifest, const ig_safetensors *file, const char *path) {
  char *text = NULL, more[64] = "";
  size_t size = 0;
  ig_problems problems = {open_memstream(&text, &size), 0};
  if (!problems.out) return ig_fail_memory();
  const bool partial = is_trainable_part(manifest, file);
  for (size_t i = 0; i < manifest->state_count; ++i) {
    compare_state(manifest, &manifest->state[i], file, partial && manifest->state[i].frozen, &problems);
  }
  for (size_t i = 0; i < file->count; ++i) {
    const char *name = file->tensors[i].name;
    if (!is_known(manifest, name) && !is_passed_over(manifest, name)) add_problem(&problems, "%s is unknown", name);
  }
  fclose(problems.out);
  if (problems.count > LISTED) snprintf(more, sizeof more, ", and %zu more", problems.count - LISTED);
  const irongrad_status status =
      problems.count == 0 ? IRONGRAD_OK
                          : ig_fail(IRONGRAD_ARTIFACT_ERROR,
                                    "%s does not fit this step (another model or optimizer?): %s%s", path,
                                    text ? text : "", more);
  free(text);
  return status;
}

/* Refuse a file with tensors that lie in the base file: they cannot be replaced. */
static irongrad_status check_no_base(const ig_manifest *manifest, const ig_exported *exported,
                                     const ig_safetensors *file, const char *path) {
  for (size_t i = 0; i < manifest->state_count; ++i) {
    const char *name = manifest->state[i].tensor.name;
    if (!ig_safetensors_find(file, name) || find_exported(exported, name)) continue;
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s holds %s, which lies in the base file. Save the trainable state alone",
                   path, name);
  }
  return IRONGRAD_OK;
}

static iree_status_t push_state(irongrad_session *session, const ig_entry *entry, const ig_exported *exported,
                                const ig_safetensors *file, iree_vm_list_t *arguments) {
  for (size_t i = 0; i < entry->input_count; ++i) {
    const ig_tensor *tensor = &entry->inputs[i];
    const ig_stored *found = ig_safetensors_find(file, tensor->name);
    const ig_bytes *kept = find_exported(exported, tensor->name);
    const cJSON *size;
    int64_t shape[IRONGRAD_MAX_RANK];
    size_t rank = 0;
    if ((!found && !kept) || cJSON_GetArraySize(tensor->shape) > IRONGRAD_MAX_RANK) {
      return iree_make_status(IREE_STATUS_UNIMPLEMENTED, "the tensor %s cannot be imported", tensor->name);
    }
    cJSON_ArrayForEach(size, tensor->shape) shape[rank++] = (int64_t)size->valuedouble;
    IREE_RETURN_IF_ERROR(ig_module_push(session->module, arguments, tensor->dtype, found ? found->data : kept->data,
                                        rank, shape));
  }
  return iree_ok_status();
}

static irongrad_status import_state(irongrad_session *session, const ig_exported *exported,
                                    const ig_safetensors *file) {
  const ig_entry *entry;
  iree_vm_list_t *arguments = NULL, *results = NULL;
  char reason[1024];
  irongrad_status status = find_entry(&session->manifest, "import_state", &entry);
  if (status != IRONGRAD_OK) return status;
  iree_status_t pushed = iree_vm_list_create(iree_vm_make_undefined_type_def(), entry->input_count,
                                             iree_allocator_system(), &arguments);
  if (iree_status_is_ok(pushed)) pushed = push_state(session, entry, exported, file, arguments);
  if (iree_status_is_ok(pushed)) {
    status = ig_module_run(session->module, entry, arguments, &results);
  } else {
    ig_reason(pushed, reason, sizeof reason);
    status = ig_fail(IRONGRAD_ARTIFACT_ERROR, "the state cannot be copied to the device: %s", reason);
  }
  iree_vm_list_release(results);
  iree_vm_list_release(arguments);
  return status;
}

irongrad_status irongrad_restore(irongrad_session *session, const char *path) {
  ig_exported exported = {0};
  ig_safetensors file;
  irongrad_status status = ig_safetensors_read(path, &file);
  if (status == IRONGRAD_OK) status = check_base(&session->manifest, &file, path);
  if (status == IRONGRAD_OK) status = check_fit(&session->manifest, &file, path);
  if (status == IRONGRAD_OK) {
    pthread_mutex_lock(&session->lock);
    status = export_state(session, &exported);
    if (status == IRONGRAD_OK) status = check_no_base(&session->manifest, &exported, &file, path);
    if (status == IRONGRAD_OK) status = import_state(session, &exported, &file);
    pthread_mutex_unlock(&session->lock);
  }
  free_exported(&exported);
  ig_safetensors_free(&file);
  return status;
}
