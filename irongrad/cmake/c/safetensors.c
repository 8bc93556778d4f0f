#include "safetensors.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dtype.h"
#include "error.h"
#include "json.h"
#include "sha256.h"

/* The member of the metadata that holds `about` as a text of JSON, and the member of `about` with the checksum. */
static const char about_key[] = "irongrad", checksum_key[] = "sha256", metadata_key[] = "__metadata__";

enum { LENGTH_SIZE = 8, ALIGNMENT = 64, LONGEST_HEADER = 100000000 };

static int by_place(const void *one, const void *other) {
  const ig_stored *a = one, *b = other;
  if (a->data != b->data) return a->data < b->data ? -1 : 1;
  return (a->size > b->size) - (a->size < b->size);
}

/* Wide elements first, so that each tensor is aligned; then by name. */
static int by_width(const void *one, const void *other) {
  const ig_stored *a = one, *b = other;
  const size_t first = ig_dtype_of(a->dtype)->size, second = ig_dtype_of(b->dtype)->size;
  return first == second ? strcmp(a->name, b->name) : first > second ? -1 : 1;
}

static int by_name(const void *one, const void *other) {
  return strcmp(((const ig_stored *)one)->name, ((const ig_stored *)other)->name);
}

/* Print a text as Python's json.dumps does: in ASCII, with UTF-16 escapes for all other characters. */
static void print_text(FILE *out, const char *text) {
  static const char escaped[] = "\"\\\n\r\t\f\b", letters[] = "\"\\nrtfb";
  fputc('"', out);
  for (const unsigned char *at = (const unsigned char *)text; *at;) {
    const char *found = strchr(escaped, *at);
    if (found) {
      fprintf(out, "\\%c", letters[found - escaped]);
    } else if (*at >= 0x20 && *at < 0x7f) {
      fputc(*at, out);
    } else {
      const int more = *at < 0x80 ? 0 : *at >= 0xf0 ? 3 : *at >= 0xe0 ? 2 : 1;
      uint32_t point = more ? *at & (0x3f >> more) : *at;
      for (int i = 0; i < more && (at[1] & 0xc0) == 0x80; ++i) point = point << 6 | (*++at & 0x3f);
      if (point >= 0x10000) fprintf(out, "\\u%04x", 0xd800 + ((point - 0x10000) >> 10));
      fprintf(out, "\\u%04x", point >= 0x10000 ? 0xdc00 + ((point - 0x10000) & 0x3ff) : point);
    }
    ++at;
  }
  fputc('"', out);
}

static bool hash_tensor(const ig_stored *tensor, char hex[IG_SHA256_HEX]) {
  char *text = NULL;
  size_t size = 0;
  const cJSON *dimension;
  FILE *out = open_memstream(&text, &size);
  if (!out) return false;
  fputc('[', out);
  print_text(out, tensor->name);
  fprintf(out, ", \"%s\", [", ig_dtype_of(tensor->dtype)->name);
  cJSON_ArrayForEach(dimension, tensor->shape) {
    fprintf(out, "%s%.0f", dimension == tensor->shape->child ? "" : ", ", dimension->valuedouble);
  }
  fputs("]]", out);
  const bool printed = fclose(out) == 0;
  EVP_MD_CTX *hash = printed ? ig_sha256_add(ig_sha256_begin(), text, size) : NULL;
  free(text);
  return ig_sha256_end(ig_sha256_add(hash, tensor->data, tensor->size), hex);
}

/* The checksum of tensors in the order of their names, as the Python reader computes it. */
static bool checksum(const ig_stored *tensors, size_t count, char hex[IG_SHA256_HEX]) {
  char *text = NULL;
  size_t size = 0;
  FILE *out = open_memstream(&text, &size);
  if (!out) return false;
  bool done = true;
  fputc('[', out);
  for (size_t i = 0; i < count && done; ++i) {
    done = hash_tensor(&tensors[i], hex);
    fputs(i ? ", [" : "[", out);
    print_text(out, tensors[i].name);
    fprintf(out, ", \"%s\"]", hex);
  }
  fputc(']', out);
  done = fclose(out) == 0 && done;
  EVP_MD_CTX *hash = done ? ig_sha256_add(ig_sha256_begin(), text, size) : NULL;
  free(text);
  return ig_sha256_end(hash, hex);
}

static irongrad_status damaged(const char *path, const char *how) {
  return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s is not a readable safetensors file: %s", path, how);
}

static bool read_tensor(const cJSON *entry, const ig_bytes *bytes, size_t begin, ig_stored *tensor) {
  const cJSON *place = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
  uint64_t start, end;
  size_t elements;
  tensor->name = entry->string;
  tensor->shape = cJSON_GetObjectItemCaseSensitive(entry, "shape");
  if (!ig_dtype_stored(ig_json_text(entry, "dtype"), &tensor->dtype) ||
      !ig_json_elements(tensor->shape, &elements) || cJSON_GetArraySize(place) != 2 ||
      !ig_json_whole(cJSON_GetArrayItem(place, 0), &start) || !ig_json_whole(cJSON_GetArrayItem(place, 1), &end)) {
    return false;
  }
  tensor->size = elements * ig_dtype_of(tensor->dtype)->size;
  if (end > bytes->size - begin || start > end || end - start != tensor->size) return false;
  tensor->data = bytes->data + begin + start;
  return true;
}

/* Whether the tensors follow each other without gaps, up to the end of the file. */
static bool are_contiguous(ig_safetensors *file, size_t begin) {
  const uint8_t *end = file->bytes.data + begin;
  qsort(file->tensors, file->count, sizeof *file->tensors, by_place);
  for (size_t i = 0; i < file->count; ++i) {
    if (file->tensors[i].data != end) return false;
    end += file->tensors[i].size;
  }
  return end == file->bytes.data + file->bytes.size;
}

static irongrad_status read_tensors(const char *path, ig_safetensors *file, size_t begin) {
  const cJSON *entry;
  bool has_metadata = false;
  file->tensors = calloc((size_t)cJSON_GetArraySize(file->header) + 1, sizeof *file->tensors);
  if (!file->tensors) return ig_fail_memory();
  cJSON_ArrayForEach(entry, file->header) {
    if (strcmp(entry->string, metadata_key) == 0) {
      if (has_metadata) return damaged(path, "its header has two tables of metadata");
      has_metadata = true;
    } else if (!read_tensor(entry, &file->bytes, begin, &file->tensors[file->count++])) {
      return ig_fail(IRONGRAD_ARTIFACT_ERROR,
                     "%s is not a readable safetensors file: its header does not say the dtype, shape and place of %s",
                     path, entry->string);
    }
  }
  if (!are_contiguous(file, begin)) return damaged(path, "its tensors do not fill it without gaps");
  qsort(file->tensors, file->count, sizeof *file->tensors, by_name);
  for (size_t i = 1; i < file->count; ++i) {
    if (by_name(&file->tensors[i - 1], &file->tensors[i]) == 0) return damaged(path, "its header has a name twice");
  }
  return IRONGRAD_OK;
}

static irongrad_status compare_checksum(const char *path, ig_safetensors *file) {
  const char *text = ig_json_text(cJSON_GetObjectItemCaseSensitive(file->header, metadata_key), about_key);
  file->about = text ? cJSON_Parse(text) : NULL;
  const char *recorded = ig_json_text(file->about, checksum_key);
  char hex[IG_SHA256_HEX];
  if (!recorded) return IRONGRAD_OK;
  if (!checksum(file->tensors, file->count, hex)) return ig_fail_memory();
  if (strcmp(recorded, hex) == 0) return IRONGRAD_OK;
  return damaged(path, "its tensors differ from its checksum, so it was damaged after it was written");
}

irongrad_status ig_safetensors_read(const char *path, ig_safetensors *file) {
  uint64_t length = 0;
  *file = (ig_safetensors){0};
  irongrad_status status = ig_read_file(path, &file->bytes);
  if (status != IRONGRAD_OK) return status;
  if (file->bytes.size < LENGTH_SIZE) return damaged(path, "it is too short for a header");
  for (int i = 0; i < LENGTH_SIZE; ++i) length |= (uint64_t)file->bytes.data[i] << 8 * i;
  if (length > file->bytes.size - LENGTH_SIZE || length > LONGEST_HEADER) {
    return damaged(path, "its header does not fit into it");
  }
  file->header = ig_json_parse(file->bytes.data + LENGTH_SIZE, (size_t)length);
  if (!cJSON_IsObject(file->header)) return damaged(path, "its header is no table of tensors");
  status = read_tensors(path, file, LENGTH_SIZE + (size_t)length);
  return status == IRONGRAD_OK ? compare_checksum(path, file) : status;
}

void ig_safetensors_free(ig_safetensors *file) {
  free(file->bytes.data);
  free(file->tensors);
  cJSON_Delete(file->header);
  cJSON_Delete(file->about);
  *file = (ig_safetensors){0};
}

const ig_stored *ig_safetensors_find(const ig_safetensors *file, const char *name) {
  const ig_stored key = {.name = name};
  return bsearch(&key, file->tensors, file->count, sizeof *file->tensors, by_name);
}

static bool add_tensor(cJSON *header, const ig_stored *tensor, size_t start) {
  cJSON *entry = cJSON_AddObjectToObject(header, tensor->name);
  cJSON *shape = cJSON_Duplicate(tensor->shape, 1);
  if (!cJSON_AddStringToObject(entry, "dtype", ig_dtype_of(tensor->dtype)->stored) ||
      !cJSON_AddItemToObject(entry, "shape", shape)) {
    cJSON_Delete(shape);
    return false;
  }
  cJSON *place = cJSON_AddArrayToObject(entry, "data_offsets");
  return cJSON_AddItemToArray(place, cJSON_CreateNumber((double)start)) &&
         cJSON_AddItemToArray(place, cJSON_CreateNumber((double)(start + tensor->size)));
}

/* The header as a text; NULL if there is not enough memory. */
static char *header_text(const ig_stored *tensors, size_t count, const char *about) {
  cJSON *header = cJSON_CreateObject();
  bool done = cJSON_AddStringToObject(cJSON_AddObjectToObject(header, metadata_key), about_key, about) != NULL;
  size_t start = 0;
  for (size_t i = 0; i < count && done; ++i) {
    done = add_tensor(header, &tensors[i], start);
    start += tensors[i].size;
  }
  char *text = done ? cJSON_PrintUnformatted(header) : NULL;
  cJSON_Delete(header);
  return text;
}

/* The length of the header, and the header, padded with spaces. */
static ig_bytes framed(const char *text) {
  const size_t length = strlen(text);
  const size_t size = (LENGTH_SIZE + length + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  ig_bytes beginning = {malloc(size), size};
  if (!beginning.data) return beginning;
  memset(beginning.data, ' ', size);
  for (int i = 0; i < LENGTH_SIZE; ++i) beginning.data[i] = (uint8_t)((size - LENGTH_SIZE) >> 8 * i);
  memcpy(beginning.data + LENGTH_SIZE, text, length);
  return beginning;
}

/* The text of `about` with the checksum of the tensors; NULL if there is not enough memory. */
static char *about_text(const ig_stored *tensors, size_t count, cJSON *about) {
  char hex[IG_SHA256_HEX];
  if (!checksum(tensors, count, hex) || !cJSON_AddStringToObject(about, checksum_key, hex)) return NULL;
  return cJSON_PrintUnformatted(about);
}

irongrad_status ig_safetensors_write(const char *path, ig_stored *tensors, size_t count, cJSON *about) {
  qsort(tensors, count, sizeof *tensors, by_name);
  char *said = about_text(tensors, count, about);
  qsort(tensors, count, sizeof *tensors, by_width);
  char *text = said ? header_text(tensors, count, said) : NULL;
  ig_bytes *parts = calloc(count + 1, sizeof *parts);
  irongrad_status status = IRONGRAD_MEMORY_ERROR;
  if (text && parts && (parts[0] = framed(text)).data) {
    for (size_t i = 0; i < count; ++i) parts[i + 1] = (ig_bytes){(uint8_t *)tensors[i].data, tensors[i].size};
    status = ig_replace_file(path, parts, count + 1);
    free(parts[0].data);
  } else {
    ig_fail_memory();
  }
  free(parts);
  cJSON_free(text);
  cJSON_free(said);
  return status;
}
