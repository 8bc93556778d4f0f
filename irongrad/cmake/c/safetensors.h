/* Safetensors files, with the checksum that ours carry; refuses what irongrad/runtime/safetensors_file.py refuses. */
#ifndef IRONGRAD_SAFETENSORS_H
#define IRONGRAD_SAFETENSORS_H

#include <cjson/cJSON.h>

#include "files.h"
#include "irongrad.h"

/* A tensor of a file. */
typedef struct ig_stored {
  const char *name;
  irongrad_dtype dtype;
  const cJSON *shape;
  const uint8_t *data;
  size_t size; /* bytes */
} ig_stored;

/* A file in memory. */
typedef struct ig_safetensors {
  ig_bytes bytes;
  cJSON *header;
  cJSON *about; /* what our writers record about a file; NULL in a file from elsewhere */
  ig_stored *tensors; /* by name */
  size_t count;
} ig_safetensors;

/* Read a file, and compare its tensors with its checksum if it has one. The caller frees it, also after a failure. */
irongrad_status ig_safetensors_read(const char *path, ig_safetensors *file);
void ig_safetensors_free(ig_safetensors *file);

/* NULL if the file has no such tensor. */
const ig_stored *ig_safetensors_find(const ig_safetensors *file, const char *name);

/* Replace `path` by a file of the tensors, which are reordered. Adds a checksum to `about`. */
irongrad_status ig_safetensors_write(const char *path, ig_stored *tensors, size_t count, cJSON *about);

#endif
