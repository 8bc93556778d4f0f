#include "sha256.h"

#include <stdio.h>

EVP_MD_CTX *ig_sha256_begin(void) {
  EVP_MD_CTX *context = EVP_MD_CTX_new();
  if (context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) == 1) return context;
  EVP_MD_CTX_free(context);
  return NULL;
}

EVP_MD_CTX *ig_sha256_add(EVP_MD_CTX *context, const void *data, size_t size) {
  if (!context || size == 0 || EVP_DigestUpdate(context, data, size) == 1) return context;
  EVP_MD_CTX_free(context);
  return NULL;
}

bool ig_sha256_end(EVP_MD_CTX *context, char hex[IG_SHA256_HEX]) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  const bool done = context && EVP_DigestFinal_ex(context, digest, &length) == 1;
  EVP_MD_CTX_free(context);
  for (unsigned i = 0; done && i < length; ++i) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
  return done;
}
