#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"

enum { PIECE = 1 << 20 };

static irongrad_status unreadable(const char *path, int error) {
  if (error == ENOENT) return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s does not exist", path);
  return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s cannot be read: %s", path, strerror(error));
}

/* Open a regular file, and find its size. */
static irongrad_status open_file(const char *path, int *file, size_t *size) {
  struct stat status;
  /* Not to wait for the writer of a pipe. */
  *file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (*file < 0) return unreadable(path, errno);
  if (fstat(*file, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(*file);
    return ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s is no file", path);
  }
  *size = (size_t)status.st_size;
  return IRONGRAD_OK;
}

/* Read up to `size` bytes; the file may be shorter. Returns the number of bytes, or -1. */
static ssize_t read_up_to(int file, uint8_t *data, size_t size) {
  size_t done = 0;
  while (done < size) {
    const ssize_t now = read(file, data + done, size - done);
    if (now < 0 && errno == EINTR) continue;
    if (now < 0) return -1;
    if (now == 0) break;
    done += (size_t)now;
  }
  return (ssize_t)done;
}

irongrad_status ig_read_file(const char *path, ig_bytes *bytes) {
  int file = -1;
  *bytes = (ig_bytes){0};
  irongrad_status status = open_file(path, &file, &bytes->size);
  if (status != IRONGRAD_OK) return status;
  bytes->data = malloc(bytes->size + 1);
  if (!bytes->data) {
    close(file);
    return ig_fail_memory();
  }
  const ssize_t done = read_up_to(file, bytes->data, bytes->size);
  const int error = errno;
  close(file);
  if (done == (ssize_t)bytes->size) return IRONGRAD_OK;
  free(bytes->data);
  *bytes = (ig_bytes){0};
  return done < 0 ? unreadable(path, error)
                  : ig_fail(IRONGRAD_ARTIFACT_ERROR, "%s became shorter while it was read", path);
}

irongrad_status ig_hash_file(const char *path, char hex[IG_SHA256_HEX], size_t *size) {
  int file = -1;
  irongrad_status status = open_file(path, &file, size);
  if (status != IRONGRAD_OK) return status;
  uint8_t *piece = malloc(PIECE);
  EVP_MD_CTX *hash = ig_sha256_begin();
  ssize_t read = piece ? PIECE : 0;
  while (read == PIECE) {
    read = read_up_to(file, piece, PIECE);
    if (read > 0) hash = ig_sha256_add(hash, piece, (size_t)read);
  }
  const int error = errno;
  const bool hashed = ig_sha256_end(hash, hex);
  close(file);
  if (read < 0) status = unreadable(path, error);
  if (!piece || !hashed) status = ig_fail_memory();
  free(piece);
  return status;
}

char *ig_join_path(const char *directory, const char *name) {
  const size_t size = strlen(directory) + strlen(name) + 2;
  char *path = malloc(size);
  if (path) snprintf(path, size, "%s/%s", directory, name);
  return path;
}

static bool write_all(int file, const ig_bytes *parts, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t done = 0; done < parts[i].size;) {
      const ssize_t now = write(file, parts[i].data + done, parts[i].size - done);
      if (now < 0 && errno == EINTR) continue;
      if (now < 0) return false;
      done += (size_t)now;
    }
  }
  return true;
}

/* Make the rename itself survive a power failure. Some file systems cannot open a directory: then nothing happens. */
static void sync_directory_of(char *path) {
  const int directory = open(dirname(path), O_RDONLY | O_CLOEXEC);
  if (directory < 0) return;
  fsync(directory);
  close(directory);
}

/* Open and lock `temporary`. A file that a killed writer left is taken over. Returns -1 with errno. */
static int open_temporary(const char *temporary) {
  struct stat opened, named;
  const int file = open(temporary, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (file < 0) return -1;
  /* Another writer may have renamed the file before its lock was ours. */
  if (flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &opened) == 0 && stat(temporary, &named) == 0 &&
      opened.st_ino == named.st_ino && ftruncate(file, 0) == 0) {
    return file;
  }
  close(file);
  errno = EBUSY;
  return -1;
}

/* Write a file beside `path`, and rename it. Returns 0, or errno. */
static int replace(const char *path, const char *temporary, const ig_bytes *parts, size_t count) {
  struct stat old;
  const bool exists = stat(path, &old) == 0;
  if (exists && !S_ISREG(old.st_mode)) return S_ISDIR(old.st_mode) ? EISDIR : EINVAL;
  const int file = open_temporary(temporary);
  if (file < 0) return errno;
  int error = 0;
  if (!write_all(file, parts, count) || (exists && fchmod(file, old.st_mode & 07777) != 0) || fsync(file) != 0 ||
      rename(temporary, path) != 0) {
    error = errno;
    unlink(temporary);
  }
  close(file);
  return error;
}

irongrad_status ig_replace_file(const char *path, const ig_bytes *parts, size_t count) {
  char *target = realpath(path, NULL); /* of a symbolic link */
  if (!target) target = strdup(path);
  const size_t size = target ? strlen(target) + sizeof ".tmp" : 0;
  char *temporary = malloc(size + 1);
  irongrad_status status = IRONGRAD_OK;
  if (target && temporary) {
    snprintf(temporary, size, "%s.tmp", target);
    const int error = replace(target, temporary, parts, count);
    if (error == EBUSY) {
      status = ig_fail(IRONGRAD_FILE_ERROR, "%s cannot be written: another program is writing it", path);
    } else if (error != 0) {
      status = ig_fail(IRONGRAD_FILE_ERROR, "%s cannot be written: %s", path, strerror(error));
    } else {
      sync_directory_of(target);
    }
  } else {
    status = ig_fail_memory();
  }
  free(temporary);
  free(target);
  return status;
}
