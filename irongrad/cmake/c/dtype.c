#include "dtype.h"

#include <string.h>

static const ig_dtype dtypes[] = {
    [IRONGRAD_BOOL] = {"bool", "BOOL", 1, IREE_HAL_ELEMENT_TYPE_BOOL_8},
    [IRONGRAD_INT8] = {"int8", "I8", 1, IREE_HAL_ELEMENT_TYPE_SINT_8},
    [IRONGRAD_INT16] = {"int16", "I16", 2, IREE_HAL_ELEMENT_TYPE_SINT_16},
    [IRONGRAD_INT32] = {"int32", "I32", 4, IREE_HAL_ELEMENT_TYPE_SINT_32},
    [IRONGRAD_INT64] = {"int64", "I64", 8, IREE_HAL_ELEMENT_TYPE_SINT_64},
    [IRONGRAD_UINT8] = {"uint8", "U8", 1, IREE_HAL_ELEMENT_TYPE_UINT_8},
    [IRONGRAD_UINT16] = {"uint16", "U16", 2, IREE_HAL_ELEMENT_TYPE_UINT_16},
    [IRONGRAD_UINT32] = {"uint32", "U32", 4, IREE_HAL_ELEMENT_TYPE_UINT_32},
    [IRONGRAD_UINT64] = {"uint64", "U64", 8, IREE_HAL_ELEMENT_TYPE_UINT_64},
    [IRONGRAD_FLOAT16] = {"float16", "F16", 2, IREE_HAL_ELEMENT_TYPE_FLOAT_16},
    [IRONGRAD_BFLOAT16] = {"bfloat16", "BF16", 2, IREE_HAL_ELEMENT_TYPE_BFLOAT_16},
    [IRONGRAD_FLOAT32] = {"float32", "F32", 4, IREE_HAL_ELEMENT_TYPE_FLOAT_32},
    [IRONGRAD_FLOAT64] = {"float64", "F64", 8, IREE_HAL_ELEMENT_TYPE_FLOAT_64},
    [IRONGRAD_FLOAT8_E4M3FN] = {"float8_e4m3fn", "F8_E4M3", 1, IREE_HAL_ELEMENT_TYPE_FLOAT_8_E4M3_FN},
    [IRONGRAD_FLOAT8_E5M2] = {"float8_e5m2", "F8_E5M2", 1, IREE_HAL_ELEMENT_TYPE_FLOAT_8_E5M2},
    [IRONGRAD_COMPLEX64] = {"complex64", "C64", 8, IREE_HAL_ELEMENT_TYPE_COMPLEX_FLOAT_64},
};

enum { COUNT = sizeof dtypes / sizeof *dtypes };

const ig_dtype *ig_dtype_of(irongrad_dtype dtype) {
  return (unsigned)dtype < COUNT ? &dtypes[dtype] : NULL;
}

bool ig_dtype_named(const char *name, irongrad_dtype *dtype) {
  for (unsigned i = 0; name && i < COUNT; ++i) {
    *dtype = (irongrad_dtype)i;
    if (strcmp(dtypes[i].name, name) == 0) return true;
  }
  return false;
}

bool ig_dtype_stored(const char *name, irongrad_dtype *dtype) {
  for (unsigned i = 0; name && i < COUNT; ++i) {
    *dtype = (irongrad_dtype)i;
    if (strcmp(dtypes[i].stored, name) == 0) return true;
  }
  return false;
}
