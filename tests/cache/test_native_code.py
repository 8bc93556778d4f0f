"""A compiled library computes alone, or the functions that it takes from the system say how it may reach further."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from irongrad.cache.native_code import _only_computes, way_outside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries of other systems are no ELF files")


def extension(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return found.origin


def built(source: str, folder: Path, *options: str) -> str:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (Debian: gcc libc6-dev)")
    library = folder / "library.so"
    how = ["-shared", "-fPIC", "-O1", "-x", "c", "-", "-x", "none", "-o", library]
    subprocess.run(["cc", *how, *options], input=source, text=True, check=True)
    return str(library)


@pytest.mark.parametrize("module", ["regex._regex", "markupsafe._speedups", "msgspec._core"])
def test_extensions_that_only_compute(module: str) -> None:
    assert way_outside(extension(module)) == ""


@pytest.mark.parametrize(
    "module", ["safetensors._safetensors_rust", "tokenizers.tokenizers", "PIL._imaging", "torch._C", "pyarrow.lib"]
)
def test_extensions_that_may_do_more(module: str) -> None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"needs {module}")
    assert way_outside(extension(module))


OPENING = {
    "open": "#include <fcntl.h>\nint f(const char *p) { return open(p, O_RDONLY); }",
    "fopen": '#include <stdio.h>\nvoid *f(const char *p) { return fopen(p, "r"); }',
    "stat": "#include <sys/stat.h>\nint f(const char *p) { struct stat s; return stat(p, &s); }",
    "opendir": "#include <dirent.h>\nvoid *f(const char *p) { return opendir(p); }",
    "mmap": "#include <sys/mman.h>\nvoid *f(int n) { return mmap(0, 9, PROT_READ, MAP_PRIVATE, n, 0); }",
    "read": "#include <unistd.h>\nint f(int n, void *p) { return read(n, p, 9); }",
    "system": "#include <stdlib.h>\nint f(const char *p) { return system(p); }",
    "dlopen": "#include <dlfcn.h>\nvoid *f(const char *p) { return dlopen(p, RTLD_NOW); }",
    "syscall": "#include <unistd.h>\nlong syscall(long, ...);\nlong f(const char *p) { return syscall(2, p, 0); }",
    "getrandom": "#include <sys/random.h>\nlong f(void *p) { return getrandom(p, 9, 0); }",
    "getaddrinfo": "int getaddrinfo(const char *, void *, void *, void *);\nint f(const char *p) "
    "{ return getaddrinfo(p, 0, 0, 0); }",
    "unknown_function": "int unknown_function(int);\nint f(int n) { return unknown_function(n); }",
}


@pytest.mark.parametrize("function", OPENING)
def test_the_function_that_leads_outside_is_named(function: str, tmp_path: Path) -> None:
    assert function in way_outside(built(OPENING[function], tmp_path))


def test_functions_on_memory_numbers_and_text_lead_nowhere(tmp_path: Path) -> None:
    source = """
    #include <math.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    double f(const char *text, double x) {
        char *copy = malloc(strlen(text) + 1);
        memcpy(copy, text, strlen(text) + 1);
        printf("%s\\n", copy);
        double found = strtod(copy, 0) + sin(x) * pow(x, 3.5) + lround(x);
        free(copy);
        return found;
    }"""
    assert way_outside(built(source, tmp_path, "-lm")) == ""


def test_a_library_that_needs_another_may_do_what_that_does(tmp_path: Path) -> None:
    other = built("int g(int n) { return n; }", tmp_path, "-Wl,-soname,libother.so")
    (tmp_path / "next").mkdir()
    assert way_outside(built("int g(int); int f(int n) { return g(n); }", tmp_path / "next", other)) == "libother.so"


def test_a_file_that_is_no_library_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("text")
    assert way_outside(str(tmp_path / "text.so"))
    assert way_outside(str(tmp_path / "missing.so"))


# As compilers write the names of C++'s own functions.
CXX = ["_ZNKSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE7compareEPKc", "_Znwm", "_ZdlPvm", "_ZTVSt9bad_alloc"]
CXX_FILES = "_ZNSt13basic_filebufIcSt11char_traitsIcEE4openEPKcSt13_Ios_Openmode _ZNSt10filesystem6existsERKNS_4pathE"
C = "__memcpy_chk __errno_location atan2 casinhf llround log1pf tgamma scalbln fmaxf pthread_mutex_lock qsort strtoull"
OUTSIDE = "_ZNSt13random_device9_M_getvalEv _ZN2at9from_fileEv gzopen _Py_wfopen _PyOS_URandom memfd_create isatty"


@pytest.mark.parametrize("name", [*CXX_FILES.split(), *OUTSIDE.split()])
def test_names_that_may_lead_outside(name: str) -> None:
    assert not _only_computes(name)


@pytest.mark.parametrize("name", [*CXX, *C.split(), "PyObject_Call", "_Py_Dealloc", "__cxa_throw", "__isoc99_sscanf"])
def test_names_of_computations(name: str) -> None:
    assert _only_computes(name)
