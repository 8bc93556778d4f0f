/* Load, train and save a compiled training step from C, without Python.
 *
 *   irongrad_session *session;
 *   if (irongrad_load("build/digits", NULL, &session) != IRONGRAD_OK) {
 *     fprintf(stderr, "%s\n", irongrad_error_message());
 *   }
 *
 * Every function that returns an irongrad_status leaves a message behind if it fails. What is refused leaves the state
 * of the session as it was. Threads may share a session, which runs one call at a time.
 */
#ifndef IRONGRAD_H
#define IRONGRAD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An artifact on a device, with its state. */
typedef struct irongrad_session irongrad_session;

typedef enum irongrad_status {
  IRONGRAD_OK = 0,
  IRONGRAD_ARTIFACT_ERROR, /* an artifact or a checkpoint is missing, damaged or foreign, or cannot run here */
  IRONGRAD_GUARD_ERROR,    /* an argument or a result is refused */
  IRONGRAD_FILE_ERROR,     /* a file cannot be written; an old one is unchanged */
  IRONGRAD_MEMORY_ERROR,   /* there is not enough memory */
} irongrad_status;

/* The message of the last call that failed in this thread; empty if none has. It changes with the next failure. */
const char *irongrad_error_message(void);

typedef enum irongrad_dtype {
  IRONGRAD_BOOL, /* one byte: 0 or 1 */
  IRONGRAD_INT8,
  IRONGRAD_INT16,
  IRONGRAD_INT32,
  IRONGRAD_INT64,
  IRONGRAD_UINT8,
  IRONGRAD_UINT16,
  IRONGRAD_UINT32,
  IRONGRAD_UINT64,
  IRONGRAD_FLOAT16,
  IRONGRAD_BFLOAT16,
  IRONGRAD_FLOAT32,
  IRONGRAD_FLOAT64,
  IRONGRAD_FLOAT8_E4M3FN,
  IRONGRAD_FLOAT8_E5M2,
  IRONGRAD_COMPLEX64,
} irongrad_dtype;

enum { IRONGRAD_MAX_RANK = 8 };

/* What `irongrad_load` is asked for. A member that is NULL stands for its default. */
typedef struct irongrad_options {
  const char *target; /* the name of one of the artifact's targets; otherwise the first that can run here */
  const char *device; /* "local-task" (all cores) or "local-sync" (the calling thread); otherwise the target's own */
  const char *base;   /* the base file; otherwise where it was at compile time, seen from the artifact */
} irongrad_options;

/* Load the artifact in `directory`, which `irongrad compile -o` wrote. Its files are compared with their sha256.
 *
 * `options` may be NULL. On failure `*session` is NULL. The caller closes the session.
 */
irongrad_status irongrad_load(const char *directory, const irongrad_options *options, irongrad_session **session);

/* Free a session and its state. NULL does nothing. */
void irongrad_close(irongrad_session *session);

/* An argument of an entry point: an input, or a hyperparameter.
 *
 * A hyperparameter is a float64 of rank 0. It has the default of the optimizer if it is not given. For `train_steps` it
 * is one number for all steps, or an array of shape [K].
 */
typedef struct irongrad_argument {
  const char *name; /* NULL for the next one, in the order of the signature that `irongrad inspect` prints */
  irongrad_dtype dtype;
  const void *data; /* row-major, without gaps; copied during the call */
  size_t rank;
  int64_t shape[IRONGRAD_MAX_RANK];
} irongrad_argument;

/* Where to write a result of an entry point. */
typedef struct irongrad_result {
  const char *name;
  irongrad_dtype dtype;
  void *data;
  size_t count; /* the number of elements at `data`; it must be that of the result. If only the call itself tells that
                   number, a wrong one is an error after the call has changed the state. */
} irongrad_result;

/* IRONGRAD_TENSOR("x", IRONGRAD_FLOAT32, x, 32, 8): an argument of shape [32, 8]. For C; C++ has no such literals. */
#define IRONGRAD_TENSOR(name, dtype, data, ...)                                                                       \
  {(name), (dtype), (data), sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), {__VA_ARGS__}}
/* IRONGRAD_SCALAR("lr", IRONGRAD_FLOAT64, &lr): an argument of rank 0. */
#define IRONGRAD_SCALAR(name, dtype, data) {(name), (dtype), (data), 0, {0}}

/* Run an entry point, such as `train_step`, `train_steps`, `eval_step`, `predict` or `reset`.
 *
 * An entry point of one of several steps is called `<step>.<entry point>`. Results that are not asked for are dropped.
 * The compiled module checks shapes, dtypes and ranges. If it refuses an argument, the status is IRONGRAD_GUARD_ERROR.
 */
irongrad_status irongrad_call(irongrad_session *session, const char *entry_point, const irongrad_argument *arguments,
                              size_t argument_count, const irongrad_result *results, size_t result_count);

typedef enum irongrad_part {
  IRONGRAD_WHOLE_STATE,     /* everything: parameters, buffers, the optimizer's state, counters */
  IRONGRAD_TRAINABLE_STATE, /* without frozen tensors; only an artifact of the same base takes such a file */
} irongrad_part;

/* Write the state to a checkpoint (.safetensors), which a reader sees as the old file or the complete new one.
 *
 * The artifact needs the entry point `export_state`.
 */
irongrad_status irongrad_save(irongrad_session *session, const char *path, irongrad_part part);

/* Replace the state by a checkpoint's, whichever program wrote it. A tensor that is missing, unknown, or of another
 * shape or dtype is refused, and so is a damaged file. Frozen tensors may be missing: they keep their values.
 *
 * The artifact needs the entry points `export_state` and `import_state`.
 */
irongrad_status irongrad_restore(irongrad_session *session, const char *path);

#ifdef __cplusplus
}
#endif

#endif
