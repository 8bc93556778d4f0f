/* What a session holds. */
#ifndef IRONGRAD_SESSION_H
#define IRONGRAD_SESSION_H

#include <pthread.h>

#include "manifest.h"
#include "module.h"

struct irongrad_session {
  pthread_mutex_t lock; /* an IREE context must not run two calls at a time */
  ig_manifest manifest;
  ig_module *module;
};

#endif
