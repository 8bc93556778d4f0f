# irongrad_add_training_step: compile a training step as part of a build, and test it with iree-run-module.
#
#   irongrad_add_training_step(<name>
#     SCRIPT <file.py>            the Python file
#     FUNCTION <function>         its function that returns the irongrad.TrainStep
#     TARGETS <target>...         what to compile for, such as llvm-cpu or llvm-cpu:cpu=x86-64-v3
#     [ENTRY_POINTS <name>...]    include only these entry points
#     [DEPENDS <file>...]         files that the script reads; modules that it imports are found by themselves
#     [DESTINATION <dir>]         install the artifact as <dir>/<name>; share/irongrad otherwise
#     [PYTHON <interpreter>])     one with irongrad[compile]; IRONGRAD_PYTHON or else find_package(Python) otherwise
#
# Adds the target <name> with the properties
#   IRONGRAD_ARTIFACT_DIR         the artifact's directory
#   IRONGRAD_VMFB                 the compiled modules, in the order of TARGETS
# and, unless BUILD_TESTING is off, tests called <name>.<target>.<entry point>.

#
# irongrad_add_runtime, the C library that runs the artifact: see IronGradRuntime.cmake.

cmake_minimum_required(VERSION 3.21...4.0)
include("${CMAKE_CURRENT_LIST_DIR}/IronGradRuntime.cmake")

function(irongrad_add_training_step name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "SCRIPT;FUNCTION;DESTINATION;PYTHON" "TARGETS;ENTRY_POINTS;DEPENDS")
  _irongrad_check_arguments(${name})
  get_filename_component(script "${arg_SCRIPT}" ABSOLUTE)
  if(NOT EXISTS "${script}")
    message(FATAL_ERROR "irongrad_add_training_step(${name}): SCRIPT ${script} does not exist")
  endif()
  _irongrad_find_python(${name} "${arg_PYTHON}")

  set(directory "${CMAKE_CURRENT_BINARY_DIR}/irongrad")
  set(artifact "${directory}/${name}")
  set(golden "${directory}/${name}.golden")
  set(modules "")
  set(options "")
  foreach(target IN LISTS arg_TARGETS)
    string(REGEX REPLACE "[:,][a-z]+=" "-" file "${target}")
    string(REGEX REPLACE "[^A-Za-z0-9_.]+" "-" file "${file}")
    list(APPEND modules "${artifact}/step.${file}.vmfb")
    list(APPEND options --target "${target}")
  endforeach()
  foreach(entry_point IN LISTS arg_ENTRY_POINTS)
    list(APPEND options --entry-point "${entry_point}")
  endforeach()

  # An interrupted build may have removed the output alone, and IronGrad refuses to write into what is left.
  add_custom_command(
    OUTPUT "${artifact}/manifest.json"
    BYPRODUCTS ${modules}
    COMMAND "${CMAKE_COMMAND}" -E rm -rf "${artifact}"
    COMMAND ${irongrad_command} compile "${script}:${arg_FUNCTION}" -o "${artifact}" ${options}
            --depfile "${directory}/${name}.d"
    DEPENDS "${script}" ${arg_DEPENDS}
    DEPFILE "${directory}/${name}.d"
    COMMENT "Compiling training step ${name}"
    VERBATIM)
  add_custom_command(
    OUTPUT "${golden}/CTestTestfile.cmake"
    COMMAND "${CMAKE_COMMAND}" -E rm -rf "${golden}"
    COMMAND ${irongrad_command} golden "${artifact}" -o "${golden}"
    DEPENDS "${artifact}/manifest.json"
    COMMENT "Unpacking golden values of ${name}"
    VERBATIM)
  add_custom_target(${name} ALL DEPENDS "${artifact}/manifest.json" "${golden}/CTestTestfile.cmake")
  set_target_properties(${name} PROPERTIES
    IRONGRAD_ARTIFACT_DIR "${artifact}"
    IRONGRAD_VMFB "${modules}"
    ADDITIONAL_CLEAN_FILES "${artifact};${golden}")

  _irongrad_install(${name} "${artifact}" "${arg_DESTINATION}")
  if(NOT DEFINED BUILD_TESTING OR BUILD_TESTING)
    _irongrad_add_tests(${name} "${artifact}" "${golden}" "${irongrad_scripts}")
  endif()
endfunction()

macro(_irongrad_check_arguments name)
  foreach(keyword IN ITEMS SCRIPT FUNCTION TARGETS)
    if(NOT arg_${keyword})
      message(FATAL_ERROR "irongrad_add_training_step(${name}): ${keyword} is missing; write for instance\n"
        "  irongrad_add_training_step(${name} SCRIPT step.py FUNCTION make_step TARGETS llvm-cpu)")
    endif()
  endforeach()
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "irongrad_add_training_step(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
endmacro()

# Set irongrad_command, the start of IronGrad's command line, and irongrad_scripts, where the interpreter's tools lie.
function(_irongrad_find_python name given)
  set(python "${given}")
  if(NOT python)
    set(python "${IRONGRAD_PYTHON}")
  endif()
  if(NOT python)
    find_package(Python QUIET COMPONENTS Interpreter)
    set(python "${Python_EXECUTABLE}")
  endif()
  if(NOT python)
    message(FATAL_ERROR "irongrad_add_training_step(${name}): no Python interpreter was found. Give one that has "
      "irongrad[compile] installed: PYTHON <interpreter>, or -DIRONGRAD_PYTHON=<interpreter>")
  endif()
  set(command "${python}")
  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH package)
  cmake_path(GET package PARENT_PATH root)
  if(EXISTS "${root}/pyproject.toml") # a source tree, which need not be installed
    set(path "${root}")
    if(NOT "$ENV{PYTHONPATH}" STREQUAL "")
      string(APPEND path ":$ENV{PYTHONPATH}")
    endif()
    set(command "${CMAKE_COMMAND}" -E env "PYTHONPATH=${path}" "${python}")
  endif()
  execute_process(
    COMMAND ${command} -c "
import sys, sysconfig
from importlib.util import find_spec
needed = ('irongrad', 'torch', 'torch_mlir', 'iree', 'iree.compiler', 'iree.runtime')
missing = next((name for name in needed if find_spec(name) is None), None)
sys.exit(f'it has no module {missing}' if missing else print(sysconfig.get_path('scripts'), end=''))"
    RESULT_VARIABLE result OUTPUT_VARIABLE scripts ERROR_VARIABLE error)
  if(NOT result EQUAL 0)
    string(STRIP "${error}" error)
    if(NOT error)
      set(error "${result}")
    endif()
    message(FATAL_ERROR "irongrad_add_training_step(${name}): the interpreter ${python} cannot compile: ${error}\n"
      "Install IronGrad there (${python} -m pip install 'irongrad[compile]') or give another: PYTHON <interpreter>, "
      "or -DIRONGRAD_PYTHON=<interpreter>")
  endif()
  set(irongrad_command ${command} -m irongrad PARENT_SCOPE)
  set(irongrad_scripts "${scripts}" PARENT_SCOPE)
endfunction()

function(_irongrad_install name artifact destination)
  if(NOT destination AND CMAKE_INSTALL_DATADIR)
    set(destination "${CMAKE_INSTALL_DATADIR}/irongrad")
  elseif(NOT destination)
    set(destination share/irongrad)
  endif()
  install(DIRECTORY "${artifact}/" DESTINATION "${destination}/${name}")
endfunction()

# The golden values do not exist before the build, so ctest reads the list of tests when it runs.
function(_irongrad_add_tests name artifact golden scripts)
  find_program(IRONGRAD_RUN_MODULE iree-run-module HINTS "${scripts}"
    DOC "IREE's tool that runs the tests of training steps")
  if(NOT IRONGRAD_RUN_MODULE)
    message(FATAL_ERROR "irongrad_add_training_step(${name}): iree-run-module was not found in ${scripts} or on PATH. "
      "It comes with the Python package iree-base-runtime; give it with -DIRONGRAD_RUN_MODULE=<file>, or turn the "
      "tests off with -DBUILD_TESTING=OFF")
  endif()
  set(script "${CMAKE_CURRENT_BINARY_DIR}/irongrad/${name}.ctest.cmake")
  file(CONFIGURE OUTPUT "${script}" @ONLY CONTENT [[
set(IRONGRAD_ARTIFACT [==[@artifact@]==])
set(IRONGRAD_GOLDEN [==[@golden@]==])
set(IRONGRAD_RUN_MODULE [==[@IRONGRAD_RUN_MODULE@]==])
set(IRONGRAD_TEST_PREFIX [==[@name@.]==])
if(EXISTS "${IRONGRAD_GOLDEN}/CTestTestfile.cmake")
  include("${IRONGRAD_GOLDEN}/CTestTestfile.cmake")
else()
  add_test([==[@name@.not_built]==] [==[@name@.not_built]==])
endif()
]])
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${script}")
endfunction()
