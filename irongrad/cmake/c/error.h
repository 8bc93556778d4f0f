/* The message of the last failure. */
#ifndef IRONGRAD_ERROR_H
#define IRONGRAD_ERROR_H

#include "iree/base/api.h"
#include "irongrad.h"

/* Keep the message, and return `status`. */
__attribute__((format(printf, 2, 3))) irongrad_status ig_fail(irongrad_status status, const char *format, ...);

/* Keep the message that there is not enough memory. */
irongrad_status ig_fail_memory(void);

/* Write what an IREE status says to `text`, without its source position and call stack; free the status. */
void ig_reason(iree_status_t status, char *text, size_t size);

#endif
