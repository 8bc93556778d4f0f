#include "json.h"

#include <string.h>

static const double exact = 9007199254740992.0; /* 2^53 */

const char *ig_json_text(const cJSON *object, const char *key) {
  return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
}

size_t ig_json_count(const cJSON *object, const char *key) {
  const cJSON *member = cJSON_GetObjectItemCaseSensitive(object, key);
  return cJSON_IsArray(member) || cJSON_IsObject(member) ? (size_t)cJSON_GetArraySize(member) : 0;
}

bool ig_json_whole(const cJSON *value, uint64_t *whole) {
  if (!cJSON_IsNumber(value) || !(value->valuedouble >= 0 && value->valuedouble < exact)) return false;
  *whole = (uint64_t)value->valuedouble;
  return (double)*whole == value->valuedouble;
}

bool ig_json_elements(const cJSON *shape, size_t *count) {
  const cJSON *dimension;
  double product = 1;
  if (!cJSON_IsArray(shape)) return false;
  cJSON_ArrayForEach(dimension, shape) {
    uint64_t size;
    if (!ig_json_whole(dimension, &size)) return false;
    product *= (double)size;
  }
  if (product >= exact) return false;
  *count = (size_t)product;
  return true;
}

cJSON *ig_json_parse(const void *text, size_t size) {
  const char *end = NULL;
  cJSON *value = cJSON_ParseWithLengthOpts(text, size, &end, 0);
  while (value && end < (const char *)text + size && strchr(" \t\r\n", *end) && *end) ++end;
  if (!value || end == (const char *)text + size) return value;
  cJSON_Delete(value);
  return NULL;
}
