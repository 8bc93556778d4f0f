#include "session.h"

#include <stdlib.h>

#include "error.h"
#include "json.h"

/* Refuse an artifact of which one module on one device is only a part. */
static irongrad_status check_whole(const char *directory, const ig_manifest *manifest) {
  if (cJSON_IsObject(cJSON_GetObjectItemCaseSensitive(manifest->json, "placement"))) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR,
                   "%s runs on several devices, which only Python can; compile it without --place", directory);
  }
  if (ig_json_count(manifest->json, "shards") > 0) {
    return ig_fail(IRONGRAD_ARTIFACT_ERROR,
                   "%s divides the optimizer's state among ranks, which only Python can; compile it without --shard",
                   directory);
  }
  return IRONGRAD_OK;
}

irongrad_status irongrad_load(const char *directory, const irongrad_options *options, irongrad_session **session) {
  const irongrad_options defaults = {0};
  *session = NULL;
  irongrad_session *loaded = calloc(1, sizeof *loaded);
  if (!loaded) return ig_fail_memory();
  pthread_mutex_init(&loaded->lock, NULL);
  irongrad_status status = ig_manifest_read(directory, &loaded->manifest);
  if (status == IRONGRAD_OK) status = check_whole(directory, &loaded->manifest);
  if (status == IRONGRAD_OK) {
    status = ig_module_load(directory, &loaded->manifest, options ? options : &defaults, &loaded->module);
  }
  if (status == IRONGRAD_OK) *session = loaded;
  else irongrad_close(loaded);
  return status;
}

void irongrad_close(irongrad_session *session) {
  if (!session) return;
  ig_module_free(session->module);
  ig_manifest_free(&session->manifest);
  pthread_mutex_destroy(&session->lock);
  free(session);
}
