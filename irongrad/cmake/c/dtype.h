/* The element types, and their names in manifests, checkpoints and IREE. */
#ifndef IRONGRAD_DTYPE_H
#define IRONGRAD_DTYPE_H

#include <stdbool.h>

#include "iree/hal/api.h"
#include "irongrad.h"

typedef struct ig_dtype {
  const char *name;   /* numpy's, as in the manifest */
  const char *stored; /* that of safetensors */
  size_t size;        /* bytes */
  iree_hal_element_type_t element;
} ig_dtype;

/* NULL if `dtype` is none of the enumerators. */
const ig_dtype *ig_dtype_of(irongrad_dtype dtype);

/* Find a dtype by numpy's name, or by that of safetensors; return whether there is one. `name` may be NULL. */
bool ig_dtype_named(const char *name, irongrad_dtype *dtype);
bool ig_dtype_stored(const char *name, irongrad_dtype *dtype);

#endif
