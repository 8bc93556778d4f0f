# irongrad_add_runtime: build the C library that loads and trains artifacts.
#
#   irongrad_add_runtime(
#     [IREE_SOURCE_DIR <dir>])    IREE's source; IRONGRAD_IREE_SOURCE_DIR otherwise
#
# Adds the library irongrad::runtime, whose header is irongrad.h. It also adds IREE's runtime, unless the project has
# done so, with the CPU drivers alone. It needs cJSON, OpenSSL's libcrypto and CMake 3.26.

function(irongrad_add_runtime)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "IREE_SOURCE_DIR" "")
  if(TARGET irongrad_runtime)
    return()
  endif()
  if(NOT TARGET iree_runtime_runtime)
    if(NOT arg_IREE_SOURCE_DIR)
      set(arg_IREE_SOURCE_DIR "${IRONGRAD_IREE_SOURCE_DIR}")
    endif()
    _irongrad_add_iree("${arg_IREE_SOURCE_DIR}")
  endif()

  find_package(OpenSSL REQUIRED COMPONENTS Crypto)
  find_path(IRONGRAD_CJSON_INCLUDE_DIR cjson/cJSON.h DOC "The folder of cjson/cJSON.h")
  find_library(IRONGRAD_CJSON_LIBRARY cjson DOC "The library cJSON")
  if(NOT IRONGRAD_CJSON_INCLUDE_DIR OR NOT IRONGRAD_CJSON_LIBRARY)
    message(FATAL_ERROR "irongrad_add_runtime: cJSON was not found. On Debian it is libcjson-dev; otherwise give it with "
      "-DIRONGRAD_CJSON_INCLUDE_DIR=<dir> and -DIRONGRAD_CJSON_LIBRARY=<file>")
  endif()
  find_package(Threads REQUIRED)

  set(folder "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/c")
  set(sources call checkpoint dtype error files interpreter json manifest module safetensors session sha256)
  list(TRANSFORM sources PREPEND "${folder}/")
  list(TRANSFORM sources APPEND ".c")
  add_library(irongrad_runtime STATIC ${sources})
  add_library(irongrad::runtime ALIAS irongrad_runtime)
  target_include_directories(irongrad_runtime PUBLIC "${folder}" PRIVATE "${IRONGRAD_CJSON_INCLUDE_DIR}")
  set_target_properties(irongrad_runtime PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS ON) # and POSIX
  target_link_libraries(irongrad_runtime PRIVATE
    iree::runtime
    iree::base::internal::cpu
    iree::base::tooling::flags
    iree::hal::drivers
    iree::io::formats::parser_registry
    iree::io::parameter_index_provider
    iree::modules::hal::types
    iree::modules::io::parameters
    iree::vm::bytecode::assembler
    iree::vm::bytecode::module
    OpenSSL::Crypto
    Threads::Threads
    "${IRONGRAD_CJSON_LIBRARY}")
endfunction()

# Add the targets of IREE's runtime that something here needs; the project may set these options otherwise.
function(_irongrad_add_iree source)
  if(NOT EXISTS "${source}/runtime/src/iree/runtime/api.h")
    message(FATAL_ERROR "irongrad_add_runtime: '${source}' is no source tree of IREE. Give one with "
      "-DIRONGRAD_IREE_SOURCE_DIR=<dir>; of its submodules it needs third_party/flatcc alone")
  endif()
  if(CMAKE_VERSION VERSION_LESS 3.26)
    message(FATAL_ERROR "irongrad_add_runtime: IREE needs CMake 3.26, and this is ${CMAKE_VERSION}")
  endif()
  foreach(option IN ITEMS COMPILER TESTS BENCHMARKS SAMPLES PYTHON_BINDINGS BINDINGS_TFLITE)
    set(IREE_BUILD_${option} OFF CACHE BOOL "")
  endforeach()
  foreach(option IN ITEMS ENABLE_CPUINFO ENABLE_LIBBACKTRACE ENABLE_WERROR_FLAG HAL_DRIVER_DEFAULTS
                    ERROR_ON_MISSING_SUBMODULES)
    set(IREE_${option} OFF CACHE BOOL "")
  endforeach()
  # With this loader, every device that opens disturbs the calls of other threads (irongrad/runtime/vm_instance.py).
  set(IREE_HAL_EXECUTABLE_LOADER_VMVX_MODULE OFF CACHE BOOL "")
  foreach(driver IN ITEMS LOCAL_SYNC LOCAL_TASK)
    set(IREE_HAL_DRIVER_${driver} ON CACHE BOOL "")
  endforeach()
  add_subdirectory("${source}" "${CMAKE_CURRENT_BINARY_DIR}/iree" EXCLUDE_FROM_ALL SYSTEM)
endfunction()
