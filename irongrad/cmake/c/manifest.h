/* The manifest of an artifact: what a C program needs of manifest.json. All texts belong to the parsed file. */
#ifndef IRONGRAD_MANIFEST_H
#define IRONGRAD_MANIFEST_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdio.h>

#include "irongrad.h"

/* An input or a result of an entry point, or a tensor of the state. */
typedef struct ig_tensor {
  const char *name;
  irongrad_dtype dtype;
  const cJSON *shape; /* numbers, and names of dimensions that vary */
} ig_tensor;

typedef struct ig_entry {
  char *symbol; /* the name of the exported function */
  bool stacked; /* whether its arguments are stacked over K steps */
  size_t input_count, hyper_count, output_count;
  ig_tensor *inputs, *outputs;
  const cJSON *hypers; /* names */
} ig_entry;

typedef struct ig_state {
  ig_tensor tensor;
  const cJSON *aliases; /* further names in a checkpoint */
  bool frozen;
  bool counts; /* whether no value may be below 0 */
} ig_state;

typedef struct ig_manifest {
  cJSON *json;
  size_t entry_count, state_count;
  ig_entry *entries;
  ig_state *state;
  const char *base; /* identifies the frozen tensors; may be empty */
  const char *digest;
  bool updates; /* whether it has state that only updates read */
} ig_manifest;

/* Read `directory`/manifest.json. The caller frees it, also after a failure. */
irongrad_status ig_manifest_read(const char *directory, ig_manifest *manifest);
void ig_manifest_free(ig_manifest *manifest);

/* NULL if there is no such entry point. */
const ig_entry *ig_manifest_entry(const ig_manifest *manifest, const char *symbol);

/* Find the default of a hyperparameter; false if it has none. */
bool ig_manifest_default(const ig_manifest *manifest, const char *hyper, double *value);

/* Whether a hyperparameter may be infinite. */
bool ig_manifest_may_be_infinite(const ig_manifest *manifest, const char *hyper);

/* Write a signature as `irongrad inspect` prints it. */
void ig_print_signature(FILE *file, const ig_entry *entry);

#endif
