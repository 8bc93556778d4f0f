/* Train the digits: train ARTIFACT DATA CHECKPOINT STEPS
 *
 * Goes on from CHECKPOINT if there is one, and saves after every 10 steps. Kill it at any moment and start it again.
 * DATA holds batches of 32 images, float32 [32, 1, 8, 8], each followed by its labels, int64 [32].
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "irongrad.h"

enum { BATCH = 32, PIXELS = 64, EVERY = 10 };

typedef struct batch {
  float x[BATCH * PIXELS];
  int64_t y[BATCH];
} batch;

static void check(irongrad_status status) {
  if (status == IRONGRAD_OK) return;
  fprintf(stderr, "train: %s\n", irongrad_error_message());
  exit(1);
}

/* Read the batch of a step; the data repeats from its beginning. */
static void read_batch(FILE *data, int64_t step, batch *next) {
  if (fseek(data, 0, SEEK_END) != 0) exit(1);
  const int64_t count = ftell(data) / (int64_t)sizeof *next;
  if (count > 0 && fseek(data, (long)(step % count) * (long)sizeof *next, SEEK_SET) == 0 &&
      fread(next, sizeof *next, 1, data) == 1) {
    return;
  }
  fprintf(stderr, "train: the data holds no batch\n");
  exit(1);
}

static int64_t steps_so_far(irongrad_session *session) {
  int64_t steps = 0;
  const irongrad_result results[] = {{"irongrad/steps", IRONGRAD_INT64, &steps, 1}};
  check(irongrad_call(session, "export_state", NULL, 0, results, 1));
  return steps;
}

int main(int count, char **arguments) {
  if (count != 5) {
    fprintf(stderr, "usage: %s ARTIFACT DATA CHECKPOINT STEPS\n", arguments[0]);
    return 2;
  }
  const char *checkpoint = arguments[3];
  const int64_t steps = atoll(arguments[4]);
  irongrad_session *session;
  batch now;
  FILE *data = fopen(arguments[2], "rb");
  if (!data) {
    perror(arguments[2]);
    return 1;
  }
  check(irongrad_load(arguments[1], NULL, &session));
  if (access(checkpoint, F_OK) == 0) check(irongrad_restore(session, checkpoint));

  for (int64_t step = steps_so_far(session); step < steps; ++step) {
    const double lr = 5e-3 / (1.0 + (double)step / 100.0);
    float loss;
    read_batch(data, step, &now);
    const irongrad_argument inputs[] = {
        IRONGRAD_TENSOR("x", IRONGRAD_FLOAT32, now.x, BATCH, 1, 8, 8),
        IRONGRAD_TENSOR("y", IRONGRAD_INT64, now.y, BATCH),
        IRONGRAD_SCALAR("lr", IRONGRAD_FLOAT64, &lr),
    };
    const irongrad_result results[] = {{"loss", IRONGRAD_FLOAT32, &loss, 1}};
    check(irongrad_call(session, "train_step", inputs, 3, results, 1));
    printf("%" PRId64 " %a\n", step, (double)loss);
    fflush(stdout);
    if ((step + 1) % EVERY == 0) check(irongrad_save(session, checkpoint, IRONGRAD_WHOLE_STATE));
  }
  irongrad_close(session);
  fclose(data);
  return 0;
}
