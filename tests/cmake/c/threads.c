/* Train in threads: threads ARTIFACT X Y STEPS
 *
 * Two sessions train at once, each in a thread of its own, while a thread opens and closes others; and then two threads
 * share a third session. Prints the losses of the first two, and how many steps the third has made. X is float32 [6, 8],
 * and Y is int64 [6].
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "irongrad.h"

typedef struct job {
  irongrad_session *session;
  float losses[1024];
  float x[48];
  int64_t y[6];
  int steps;
} job;

static void check(irongrad_status status) {
  if (status == IRONGRAD_OK) return;
  fprintf(stderr, "%s\n", irongrad_error_message());
  exit(1);
}

static void *train(void *given) {
  job *own = given;
  for (int i = 0; i < own->steps; ++i) {
    const double lr = 0.01;
    const irongrad_argument inputs[] = {
        IRONGRAD_TENSOR("x", IRONGRAD_FLOAT32, own->x, 6, 8),
        IRONGRAD_TENSOR("y", IRONGRAD_INT64, own->y, 6),
        IRONGRAD_SCALAR("lr", IRONGRAD_FLOAT64, &lr),
    };
    const irongrad_result results[] = {{"loss", IRONGRAD_FLOAT32, &own->losses[i], 1}};
    check(irongrad_call(own->session, "train_step", inputs, 3, results, 1));
  }
  return NULL;
}

static void read_all(const char *path, void *data, size_t size) {
  FILE *file = fopen(path, "rb");
  if (!file || fread(data, 1, size, file) != size) exit(3);
  fclose(file);
}

static void run_both(job jobs[2]) {
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, train, &jobs[i]);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
}

static void *open_and_close(void *artifact) {
  for (int i = 0; i < 50; ++i) {
    irongrad_session *session = NULL;
    check(irongrad_load(artifact, NULL, &session));
    irongrad_close(session);
  }
  return NULL;
}

int main(int count, char **arguments) {
  static job jobs[2];
  int64_t steps = 0;
  if (count != 5) return 2;
  for (int i = 0; i < 2; ++i) {
    const irongrad_options options = {.device = i ? "local-task" : "local-sync"};
    read_all(arguments[2], jobs[i].x, sizeof jobs[i].x);
    read_all(arguments[3], jobs[i].y, sizeof jobs[i].y);
    jobs[i].steps = atoi(arguments[4]);
    check(irongrad_load(arguments[1], &options, &jobs[i].session));
  }
  pthread_t other;
  pthread_create(&other, NULL, open_and_close, arguments[1]);
  run_both(jobs);
  pthread_join(other, NULL);
  for (int i = 0; i < 2; ++i) {
    for (int step = 0; step < jobs[i].steps; ++step) printf("%a ", (double)jobs[i].losses[step]);
    printf("\n");
    irongrad_close(jobs[i].session);
  }
  check(irongrad_load(arguments[1], NULL, &jobs[0].session));
  jobs[1].session = jobs[0].session;
  run_both(jobs);
  const irongrad_result results[] = {{"irongrad/steps", IRONGRAD_INT64, &steps, 1}};
  check(irongrad_call(jobs[0].session, "export_state", NULL, 0, results, 1));
  printf("%lld\n", (long long)steps);
  irongrad_close(jobs[0].session);
  return 0;
}
