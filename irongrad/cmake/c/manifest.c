#include "manifest.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "error.h"
#include "files.h"
#include "json.h"

enum { FORMAT_VERSION = 3 }; /* of irongrad/runtime/manifest.py */

static bool read_tensor(const cJSON *json, ig_tensor *tensor) {
  tensor->name = ig_json_text(json, "name");
  tensor->shape = cJSON_GetObjectItemCaseSensitive(json, "shape");
  return tensor->name && cJSON_IsArray(tensor->shape) && ig_dtype_named(ig_json_text(json, "dtype"), &tensor->dtype);
}

static bool read_tensors(const cJSON *json, const char *key, ig_tensor **tensors, size_t *count) {
  const cJSON *tensor;
  *tensors = calloc(ig_json_count(json, key) + 1, sizeof **tensors);
  if (!*tensors) return false;
  cJSON_ArrayForEach(tensor, cJSON_GetObjectItemCaseSensitive(json, key)) {
    if (!read_tensor(tensor, &(*tensors)[(*count)++])) return false;
  }
  return true;
}

static char *symbol_of(const char *step, const char *name) {
  const size_t size = strlen(step) + strlen(name) + 2;
  char *symbol = malloc(size);
  if (symbol) snprintf(symbol, size, "%s%s%s", step, *step ? "." : "", name);
  return symbol;
}

static bool all_texts(const cJSON *array) {
  const cJSON *item;
  cJSON_ArrayForEach(item, array) {
    if (!cJSON_IsString(item)) return false;
  }
  return cJSON_IsArray(array);
}

static bool read_entry(const cJSON *json, ig_entry *entry) {
  const char *name = ig_json_text(json, "name"), *step = ig_json_text(json, "step");
  entry->hypers = cJSON_GetObjectItemCaseSensitive(json, "hypers");
  entry->hyper_count = ig_json_count(json, "hypers");
  if (!name || !step || !all_texts(entry->hypers)) return false;
  entry->stacked = strcmp(name, "train_steps") == 0 || strcmp(name, "train_and_export") == 0;
  entry->symbol = symbol_of(step, name);
  return entry->symbol && read_tensors(json, "inputs", &entry->inputs, &entry->input_count) &&
         read_tensors(json, "outputs", &entry->outputs, &entry->output_count);
}

static bool read_state(const cJSON *json, ig_state *state) {
  const char *role = ig_json_text(json, "role");
  size_t count;
  state->aliases = cJSON_GetObjectItemCaseSensitive(json, "aliases");
  state->frozen = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "frozen"));
  if (!role || !read_tensor(json, &state->tensor) || !all_texts(state->aliases)) return false;
  state->counts = strcmp(role, "counter") == 0 || strcmp(role, "random") == 0 ||
                  strncmp(state->tensor.name, "optimizer/step/", strlen("optimizer/step/")) == 0;
  return ig_json_elements(state->tensor.shape, &count);
}

static bool is_of_updates(const cJSON *state) {
  const char *role = ig_json_text(state, "role");
  return role && (strcmp(role, "optimizer") == 0 || strcmp(role, "scaler") == 0);
}

static bool read_all(ig_manifest *manifest) {
  const cJSON *item, *json = manifest->json;
  manifest->base = ig_json_text(json, "base");
  manifest->digest = ig_json_text(json, "digest");
  manifest->entries = calloc(ig_json_count(json, "entry_points") + 1, sizeof *manifest->entries);
  manifest->state = calloc(ig_json_count(json, "state") + 1, sizeof *manifest->state);
  if (!manifest->base || !manifest->digest || !manifest->entries || !manifest->state) return false;
  cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "entry_points")) {
    if (!read_entry(item, &manifest->entries[manifest->entry_count++])) return false;
  }
  cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(json, "state")) {
    if (!read_state(item, &manifest->state[manifest->state_count++])) return false;
    manifest->updates = manifest->updates || is_of_updates(item);
  }
  return true;
}

/* The file carries its own sha256, with zeros in its place while it is computed. */
static bool is_undamaged(const ig_bytes *bytes, const char *digest) {
  static const char zeros[] = "0000000000000000000000000000000000000000000000000000000000000000";
  const size_t length = sizeof zeros - 1;
  char hex[IG_SHA256_HEX];
  if (strlen(digest) != length || bytes->size < length) return false;
  for (size_t start = bytes->size - length + 1; start-- > 0;) {
    if (memcmp(bytes->data + start, digest, length) != 0) continue;
    EVP_MD_CTX *hash = ig_sha256_add(ig_sha256_begin(), bytes->data, start);
    hash = ig_sha256_add(hash, zeros, length);
    hash = ig_sha256_add(hash, bytes->data + start + length, bytes->size - start - length);
    return ig_sha256_end(hash, hex) && strcmp(hex, digest) == 0;
  }
  return false;
}

static irongrad_status parse(const char *path, const ig_bytes *bytes, ig_manifest *manifest) {
  static const char damaged[] = "%s is damaged. Copy or compile the artifact again";
  uint64_t version = 0;
  manifest->json = ig_json_parse(bytes->data, bytes->size);
  if (!manifest->json) return ig_fail(IRONGRAD_ARTIFACT_ERROR, damaged, path);
  ig_json_whole(cJSON_GetObjectItemCaseSensitive(manifest->json, "format_version"), &version);
  if (version != FORMAT_VERSION) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR,
                   "%s has format version %d, and this library reads version %d. Compile the step again, or build the "
                   "library of the IronGrad that made it",
                   path, (int)version, FORMAT_VERSION);
  }
  if (!read_all(manifest) || !is_undamaged(bytes, manifest->digest)) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, damaged, path);
  }
  return IRONGRAD_OK;
}

irongrad_status ig_manifest_read(const char *directory, ig_manifest *manifest) {
  ig_bytes bytes = {0};
  *manifest = (ig_manifest){0};
  char *path = ig_join_path(directory, "manifest.json");
  if (!path) return ig_fail_memory();
  irongrad_status status = ig_read_file(path, &bytes);
  if (status == IRONGRAD_OK) status = parse(path, &bytes, manifest);
  free(bytes.data);
  free(path);
  return status;
}

void ig_manifest_free(ig_manifest *manifest) {
  for (size_t i = 0; manifest->entries && i < manifest->entry_count; ++i) {
    free(manifest->entries[i].symbol);
    free(manifest->entries[i].inputs);
    free(manifest->entries[i].outputs);
  }
  free(manifest->entries);
  free(manifest->state);
  cJSON_Delete(manifest->json);
  *manifest = (ig_manifest){0};
}

const ig_entry *ig_manifest_entry(const ig_manifest *manifest, const char *symbol) {
  for (size_t i = 0; i < manifest->entry_count; ++i) {
    if (strcmp(manifest->entries[i].symbol, symbol) == 0) return &manifest->entries[i];
  }
  return NULL;
}

bool ig_manifest_default(const ig_manifest *manifest, const char *hyper, double *value) {
  const cJSON *item;
  cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(manifest->json, "hypers")) {
    const char *name = ig_json_text(item, "name");
    const cJSON *given = cJSON_GetObjectItemCaseSensitive(item, "default");
    if (!name || strcmp(name, hyper) != 0 || !cJSON_IsNumber(given)) continue;
    *value = given->valuedouble;
    return true;
  }
  return false;
}

bool ig_manifest_may_be_infinite(const ig_manifest *manifest, const char *hyper) {
  double value;
  return strcmp(hyper, "clip_grad_norm") == 0 || strcmp(hyper, "clip_grad_value") == 0 ||
         (ig_manifest_default(manifest, hyper, &value) && isinf(value));
}

static void print_tensors(FILE *file, const ig_tensor *tensors, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const cJSON *size;
    fprintf(file, "%s%s: %s[", i ? ", " : "", tensors[i].name, ig_dtype_of(tensors[i].dtype)->name);
    cJSON_ArrayForEach(size, tensors[i].shape) {
      if (size != tensors[i].shape->child) fputs(", ", file);
      if (cJSON_IsString(size)) fputs(size->valuestring, file);
      else fprintf(file, "%.0f", size->valuedouble);
    }
    fputc(']', file);
  }
}

void ig_print_signature(FILE *file, const ig_entry *entry) {
  const cJSON *hyper;
  fprintf(file, "%s(", entry->symbol);
  print_tensors(file, entry->inputs, entry->input_count);
  cJSON_ArrayForEach(hyper, entry->hypers) {
    fprintf(file, "%s%s: float64", entry->input_count || hyper != entry->hypers->child ? ", " : "",
            hyper->valuestring);
  }
  fputs(") -> (", file);
  print_tensors(file, entry->outputs, entry->output_count);
  fputc(')', file);
}
