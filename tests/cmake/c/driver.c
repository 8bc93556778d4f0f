/* Run commands from standard input, and print the status of each and its message.
 *
 *   load DIRECTORY [device=NAME] [target=NAME] [base=FILE]
 *   call ENTRY [<NAME:DTYPE:SIZExSIZE:FILE]... [>NAME:DTYPE:COUNT:FILE]...
 *   save FILE whole|trainable
 *   restore FILE
 *   close
 *
 * DTYPE is a number of irongrad_dtype. An empty NAME gives an argument by position. Files hold raw values.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "irongrad.h"

enum { MOST = 32, BYTES = 1 << 22 };

static irongrad_session *session;

static void *read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  void *data = calloc(1, BYTES);
  if (!file || !data) exit(3);
  const size_t size = fread(data, 1, BYTES, file);
  fclose(file);
  return realloc(data, size ? size : 1); /* so that a read beyond the end is an error */
}

static void write_file(const char *path, const void *data, size_t size) {
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(data, 1, size, file) != size) exit(3);
  fclose(file);
}

/* Split `NAME:DTYPE:SIZES:FILE`. */
static void split(char *text, char *parts[4]) {
  for (int i = 0; i < 4; ++i) {
    parts[i] = text;
    char *colon = i < 3 ? strchr(text, ':') : NULL;
    if (!colon) continue;
    *colon = '\0';
    text = colon + 1;
  }
}

static irongrad_argument argument_of(char *text) {
  char *parts[4], *size;
  split(text, parts);
  const irongrad_dtype dtype = (irongrad_dtype)atoi(parts[1]);
  irongrad_argument argument = {*parts[0] ? parts[0] : NULL, dtype, read_file(parts[3]), 0, {0}};
  for (size = strtok(parts[2], "x"); size; size = strtok(NULL, "x")) {
    if (argument.rank < IRONGRAD_MAX_RANK) argument.shape[argument.rank] = atoll(size);
    ++argument.rank;
  }
  return argument;
}

static irongrad_status call(char *words[], int count) {
  irongrad_argument arguments[MOST];
  irongrad_result results[MOST];
  char *files[MOST];
  size_t argument_count = 0, result_count = 0;
  for (int i = 2; i < count; ++i) {
    if (*words[i] == '<') {
      arguments[argument_count++] = argument_of(words[i] + 1);
      continue;
    }
    char *parts[4];
    split(words[i] + 1, parts);
    const size_t elements = (size_t)atoll(parts[2]);
    files[result_count] = parts[3];
    const irongrad_dtype dtype = (irongrad_dtype)atoi(parts[1]);
    results[result_count++] = (irongrad_result){parts[0], dtype, calloc(elements + 1, 8), elements};
  }
  const irongrad_status status = irongrad_call(session, words[1], arguments, argument_count, results, result_count);
  for (size_t i = 0; i < argument_count; ++i) free((void *)arguments[i].data);
  for (size_t i = 0; i < result_count; ++i) {
    if (status == IRONGRAD_OK) write_file(files[i], results[i].data, results[i].count * 8);
    free(results[i].data);
  }
  return status;
}

static irongrad_status load(char *words[], int count) {
  irongrad_options options = {0};
  for (int i = 2; i < count; ++i) {
    char *value = strchr(words[i], '=') + 1;
    if (*words[i] == 'd') options.device = value;
    if (*words[i] == 't') options.target = value;
    if (*words[i] == 'b') options.base = value;
  }
  return irongrad_load(words[1], count > 2 ? &options : NULL, &session);
}

int main(void) {
  static char line[1 << 16];
  while (fgets(line, sizeof line, stdin)) {
    char *words[MOST], *word;
    int count = 0;
    irongrad_status status = IRONGRAD_OK;
    for (word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) words[count++] = word;
    if (count == 0) continue;
    if (strcmp(words[0], "load") == 0) {
      status = load(words, count);
    } else if (strcmp(words[0], "call") == 0) {
      char *copies[MOST];
      for (int i = 0; i < count; ++i) copies[i] = strdup(words[i]); /* strtok is used again */
      status = call(copies, count);
      for (int i = 0; i < count; ++i) free(copies[i]);
    } else if (strcmp(words[0], "save") == 0) {
      const int whole = strcmp(words[2], "whole") == 0;
      status = irongrad_save(session, words[1], whole ? IRONGRAD_WHOLE_STATE : IRONGRAD_TRAINABLE_STATE);
    } else if (strcmp(words[0], "restore") == 0) {
      status = irongrad_restore(session, words[1]);
    } else {
      irongrad_close(session);
      session = NULL;
    }
    printf("%d %s\n", (int)status, status == IRONGRAD_OK ? "" : irongrad_error_message());
    fflush(stdout);
  }
  irongrad_close(session);
  return 0;
}
