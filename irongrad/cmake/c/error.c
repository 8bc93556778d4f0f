#include "error.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[4096];

const char *irongrad_error_message(void) { return message; }

irongrad_status ig_fail(irongrad_status status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

irongrad_status ig_fail_memory(void) { return ig_fail(IRONGRAD_MEMORY_ERROR, "there is not enough memory"); }

static void cut(char *text, const char *from) {
  char *found = strstr(text, from);
  if (found) *found = '\0';
}

/* Drop the numbers of IREE's element types, such as ` (21000020)`. */
static void drop_numbers(char *text) {
  enum { DIGITS = 8, LENGTH = DIGITS + 3 };
  for (char *at = strstr(text, " ("); at; at = strstr(at, " (")) {
    const bool number = strspn(at + 2, "0123456789abcdefABCDEF") == DIGITS && at[DIGITS + 2] == ')';
    if (number) memmove(at, at + LENGTH, strlen(at + LENGTH) + 1);
    else at += 2;
  }
}

/* `FILE:LINE: CODE; MESSAGE; while …; [ 0] …` becomes `MESSAGE`, as in irongrad/runtime/status.py. */
void ig_reason(iree_status_t status, char *text, size_t size) {
  const char *code = iree_status_code_string(iree_status_code(status));
  const iree_allocator_t allocator = iree_allocator_system();
  char *whole = NULL;
  iree_host_size_t length = 0;
  if (!iree_status_to_string(status, &allocator, &whole, &length)) whole = NULL;
  iree_status_free(status);
  char *body = whole ? strstr(whole, code) : NULL;
  body = body && strncmp(body + strlen(code), "; ", 2) == 0 ? body + strlen(code) + 2 : whole;
  if (body) {
    cut(body, "; while ");
    cut(body, "\n[ ");
    cut(body, "; one for a false condition, written as a shape");
    drop_numbers(body);
    snprintf(text, size, strncmp(body, "while ", 6) == 0 ? "%s %s" : "%.0s%s", code, body);
    for (size_t end = strlen(text); end > 0 && strchr("; \n", text[end - 1]); --end) text[end - 1] = '\0';
  } else {
    snprintf(text, size, "%s", code);
  }
  iree_allocator_free(allocator, whole);
}
