/* Whether this build of IREE computes right numbers. */
#ifndef IRONGRAD_INTERPRETER_H
#define IRONGRAD_INTERPRETER_H

#include <stdbool.h>

/* Whether an internal call of a compiled module keeps both halves of its 64-bit arguments.
 *
 * IREE before 3.13.0 lost the upper half (iree-org/iree#24929), and a training step then computed with a wrong learning
 * rate. This runs such a call.
 */
bool ig_interpreter_keeps_64_bits(void);

#endif
