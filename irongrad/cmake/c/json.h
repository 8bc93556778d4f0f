/* Checked access to what cJSON parsed. */
#ifndef IRONGRAD_JSON_H
#define IRONGRAD_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The text of a member, or NULL if it is none. */
const char *ig_json_text(const cJSON *object, const char *key);

/* The number of elements of a member that is an array or an object; 0 otherwise. */
size_t ig_json_count(const cJSON *object, const char *key);

/* A number that is whole, at least 0 and exact in a double; false otherwise. */
bool ig_json_whole(const cJSON *value, uint64_t *whole);

/* The number of elements of a tensor of that shape; false if its dimensions are no whole numbers, or too large. */
bool ig_json_elements(const cJSON *shape, size_t *count);

/* Parse a text that holds one value and nothing else; NULL if it does not. */
cJSON *ig_json_parse(const void *text, size_t size);

#endif
