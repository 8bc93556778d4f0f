/* A compiled module on a device, with its state: everything that calls IREE. */
#ifndef IRONGRAD_MODULE_H
#define IRONGRAD_MODULE_H

#include "iree/runtime/api.h"
#include "irongrad.h"
#include "manifest.h"

typedef struct ig_module ig_module;

/* Load a target of the artifact in `directory`; `options` says which. On failure `*module` is NULL. */
irongrad_status ig_module_load(const char *directory, const ig_manifest *manifest, const irongrad_options *options,
                               ig_module **module);
void ig_module_free(ig_module *module);

/* Copy a tensor to the device, and append it to the arguments of a call. */
iree_status_t ig_module_push(ig_module *module, iree_vm_list_t *arguments, irongrad_dtype dtype, const void *data,
                             size_t rank, const int64_t *shape);

/* Run an entry point. The caller releases the results, also after a failure. */
irongrad_status ig_module_run(ig_module *module, const ig_entry *entry, iree_vm_list_t *arguments,
                              iree_vm_list_t **results);

/* The number of bytes of a result, and a copy of them. */
size_t ig_module_result_size(iree_vm_list_t *results, size_t index);
irongrad_status ig_module_copy_result(ig_module *module, iree_vm_list_t *results, size_t index, void *data);

#endif
