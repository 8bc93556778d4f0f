/* Makes the Nth system call on files below a directory fail, or kills the process there (LD_PRELOAD).

   The program under test sets it up through ctypes: watch(directory), then strike(n, error) before an operation. An
   error of -1 kills the process. calls() tells how many calls there were since then. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char watched[4096];
static char ours[65536]; /* file descriptors of files below the directory */
static long count, target;
static int error;

void watch(const char *directory) { strncpy(watched, directory, sizeof watched - 1); }
void strike(long nth, int code) { count = 0; target = nth; error = code; }
long calls(void) { return count; }

static int below(const char *path) { return watched[0] && path && !strncmp(path, watched, strlen(watched)); }
static int is_ours(int fd) { return fd >= 0 && fd < (int)sizeof ours && ours[fd]; }
static void note(int fd, int mine) { if (fd >= 0 && fd < (int)sizeof ours) ours[fd] = mine; }

static int fails(int mine) {
  if (!mine || ++count != target) return 0;
  if (error < 0) kill(getpid(), SIGKILL);
  errno = error;
  return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                   \
  int name(const char *path, int flags, ...) {                       \
    va_list rest; va_start(rest, flags);                             \
    mode_t mode = va_arg(rest, mode_t); va_end(rest);                \
    if (fails(below(path))) return -1;                               \
    int fd = NEXT(name)(path, flags, mode);                          \
    note(fd, below(path));                                           \
    return fd;                                                       \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                 \
  int name(int at, const char *path, int flags, ...) {               \
    va_list rest; va_start(rest, flags);                             \
    mode_t mode = va_arg(rest, mode_t); va_end(rest);                \
    if (fails(below(path) || is_ours(at))) return -1;                \
    int fd = NEXT(name)(at, path, flags, mode);                      \
    note(fd, below(path) || is_ours(at));                            \
    return fd;                                                       \
  }
OPENAT(openat)
OPENAT(openat64)

FILE *fopen64(const char *path, const char *mode) {
  if (fails(below(path))) return NULL;
  FILE *file = NEXT(fopen64)(path, mode);
  if (file) note(fileno(file), below(path));
  return file;
}

int close(int fd) { note(fd, 0); return NEXT(close)(fd); }

ssize_t write(int fd, const void *data, size_t size) {
  if (is_ours(fd) && count + 1 == target && error > 0 && size > 1) { /* a full disk takes a part first */
    ++count;
    NEXT(write)(fd, data, size / 2);
    errno = error;
    return -1;
  }
  return fails(is_ours(fd)) ? -1 : NEXT(write)(fd, data, size);
}
ssize_t read(int fd, void *data, size_t size) { return fails(is_ours(fd)) ? -1 : NEXT(read)(fd, data, size); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
  return fails(is_ours(fd)) ? -1 : NEXT(pread64)(fd, data, size, at);
}
int fsync(int fd) { return fails(is_ours(fd)) ? -1 : NEXT(fsync)(fd); }
int fchmod(int fd, mode_t mode) { return fails(is_ours(fd)) ? -1 : NEXT(fchmod)(fd, mode); }
int chmod(const char *path, mode_t mode) { return fails(below(path)) ? -1 : NEXT(chmod)(path, mode); }
int mkdir(const char *path, mode_t mode) { return fails(below(path)) ? -1 : NEXT(mkdir)(path, mode); }
int rmdir(const char *path) { return fails(below(path)) ? -1 : NEXT(rmdir)(path); }
int unlink(const char *path) { return fails(below(path)) ? -1 : NEXT(unlink)(path); }
int link(const char *from, const char *to) { return fails(below(to)) ? -1 : NEXT(link)(from, to); }
int symlink(const char *to, const char *at) { return fails(below(at)) ? -1 : NEXT(symlink)(to, at); }
int rename(const char *from, const char *to) { return fails(below(to)) ? -1 : NEXT(rename)(from, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  return fails(below(to)) ? -1 : NEXT(renameat2)(a, from, b, to, flags);
}
