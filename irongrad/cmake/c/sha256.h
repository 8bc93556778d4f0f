/* SHA-256, by OpenSSL. */
#ifndef IRONGRAD_SHA256_H
#define IRONGRAD_SHA256_H

#include <openssl/evp.h>
#include <stdbool.h>
#include <stddef.h>

enum { IG_SHA256_HEX = 65 }; /* 64 digits and a zero */

/* Begin a hash. The functions below pass a NULL context on; `ig_sha256_end` returns false if anything failed. */
EVP_MD_CTX *ig_sha256_begin(void);
EVP_MD_CTX *ig_sha256_add(EVP_MD_CTX *context, const void *data, size_t size);
/* Write the hash in hexadecimal, and free the context. */
bool ig_sha256_end(EVP_MD_CTX *context, char hex[IG_SHA256_HEX]);

#endif
