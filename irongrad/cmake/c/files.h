/* Whole files: read into memory, hashed, and replaced in one step. */
#ifndef IRONGRAD_FILES_H
#define IRONGRAD_FILES_H

#include <stdint.h>

#include "irongrad.h"
#include "sha256.h"

/* The contents of a file. `data` is never NULL, and aligned for every element type. */
typedef struct ig_bytes {
  uint8_t *data;
  size_t size;
} ig_bytes;

/* Read a file; the caller frees the data. A file that is missing or unreadable is an IRONGRAD_ARTIFACT_ERROR. */
irongrad_status ig_read_file(const char *path, ig_bytes *bytes);

/* The sha256 and the size of a file, which is read in pieces. */
irongrad_status ig_hash_file(const char *path, char hex[IG_SHA256_HEX], size_t *size);

/* Write the parts to `path`, so that a reader sees the old file or the complete new one. */
irongrad_status ig_replace_file(const char *path, const ig_bytes *parts, size_t count);

/* `directory`/`name`; NULL if there is not enough memory. The caller frees it. */
char *ig_join_path(const char *directory, const char *name);

#endif
