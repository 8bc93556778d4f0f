"""What a compiled extension can do: the functions that it takes from other libraries, read from its ELF file.

Python reports the files that its own code opens, and those alone. Native code opens files through the system's C
library. So an extension that takes no function from there but such as compute on memory opens none. Unknown functions
count as ones that do. The same holds for processes, the network, and the system's random numbers.

Source: the System V ABI, "Dynamic Linking"; the Linux Standard Base, "Symbol Versioning".
"""

from __future__ import annotations

import re
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

# The C library, and those of GCC. The names of their functions tell what they do.
_RUNTIME = re.compile(
    r"(libc|libm|libpthread|libdl|librt|libgcc_s|libstdc\+\+|ld-linux[\w-]*|libc\.musl-\w+)\.so[.\d]*"
)

_MATHS = (
    "a?(sin|cos|tan)h? atan2 sincos exp2? exp10 expm1 log(2|10|1p|b)? ilogb pow sqrt cbrt hypot erfc? [lt]gamma "
    "lgamma_r ceil floor trunc round l{1,2}round rint l{0,2}rint nearbyint fmod modf remainder remquo fma "
    "f(max|min|dim) f?abs frexp ldexp scalbl?n nextafter nexttoward copysign nan finite is(nan|inf) signbit "
    "c(real|imag|abs|arg|exp|log|pow|sqrt|proj|a?(sin|cos|tan)h?) conj fe(get|set|clear|test|raise|hold|update)\\w+"
)
_MEMORY = (
    "malloc calloc realloc reallocarray free posix_memalign aligned_alloc memalign malloc_(usable_size|trim) "
    "w?mem(p?cpy|move|set|cmp|chr|rchr|mem|ccpy) bcmp bcopy bzero ffsl{0,2} (str|stp|wcs)\\w+ tow?(lower|upper) "
    "isw?(alnum|alpha|blank|cntrl|x?digit|graph|lower|print|punct|space|upper|ctype) isascii ato[ifl]+ l{0,2}(abs|div) "
    "qsort(_r)? bsearch mb\\w+ wc\\w*tomb btowc wctob v?sscanf"
)
_CONTROL = (
    "_?_?(sig)?setjmp _?(sig)?longjmp pthread_\\w+ sem_(init|wait|post|trywait|timedwait|destroy) sched_yield abort "
    "exit atexit (secure_)?getenv getpagesize sysconf"
)
# A time is no secret of a step (docs/builds.md). What is written to open streams is not read.
_CLOCKS_AND_TEXT = (
    "clock clock_gettime gettimeofday time difftime nanosleep usleep (gm|local)time(_r)? mktime "
    "v?(s|sn|as|f|d)?printf f?put[cs] puts putchar fwrite fflush ferror perror stderr stdout localeconv"
)
_COMPILERS = (
    "errno_location tls_get_addr ctype_\\w+ assert_fail stack_chk_fail gmon_start__ cxa_\\w+ gxx_personality_v0 "
    "gcc_personality_v0 dynamic_cast (mul|div)[sdtx]c3 u?(div|mod)[dt]i[34] isoc(99|23)_(str|v?ss)\\w+ "
    "(mem|str|stp|wcs|wmem)\\w+_chk v?(s|sn|as|f)?printf_chk longjmp_chk \\w+_finite is(nan|inf)[fl]? finite[fl]? "
    "signbit[fl]? fpclassify[fl]? pthread_\\w+ str(dup|ndup|tok_r|to\\w+_internal)"
)
# Functions and classes of C++'s standard library, as compilers write their names.
_CXX = r"_Z(T[VITS])?N?K?(S[tsabiod]|9__gnu_cxx|10__cxxabiv1)\w*|_Z(n[wa]|d[la])\w+|_ZGT\w+|_Unwind_\w+|_ITM_\w+"
_CXX_OUTSIDE = re.compile(r"filebuf|fstream|filesystem|__basic_file|random_device|tzdb|time_zone|6localeC\dEPKc")

_PYTHON = re.compile(r"_?Py[A-Z_]\w*")
_PYTHON_OUTSIDE = re.compile(r"_Py\w*(open|stat|URandom|readlink|realpath)\w*")


def _any_of(names: str, ending: str = "") -> str:
    return f"({'|'.join(names.split())}){ending}"


_COMPUTES = re.compile(
    "|".join(
        [
            _any_of(_MATHS, "[fl]?"),
            _any_of(_MEMORY),
            _any_of(_CONTROL),
            _any_of(_CLOCKS_AND_TEXT),
            "__" + _any_of(_COMPILERS),
            _CXX,
        ]
    )
)


def way_outside(library: str) -> str:
    """Return a function or library by which a compiled library may read files, or reach the system otherwise.

    Args:
        library: the file of the library.

    Returns:
        Its name; empty if there is none, so the library can only compute on its arguments and call Python.
    """
    try:
        with Path(library).open("rb") as stream:
            return _way_outside(ELFFile(stream))
    except (OSError, ELFError):
        return "functions that cannot be read from its file"


def _way_outside(library: ELFFile) -> str:
    dynamic, symbols = library.get_section_by_name(".dynamic"), library.get_section_by_name(".dynsym")
    if not isinstance(dynamic, DynamicSection) or not isinstance(symbols, SymbolTableSection):
        return "functions that its file does not name"
    # Such a tag alone has the attribute.
    needed = [str(tag.needed) for tag in dynamic.iter_tags("DT_NEEDED")]  # type: ignore[attr-defined]
    if others := [name for name in needed if not _RUNTIME.fullmatch(name)]:
        return others[0]
    taken = (s.name for s in symbols.iter_symbols() if s["st_shndx"] == "SHN_UNDEF" and s.name)
    return next((name for name in taken if not _only_computes(name)), "")


def _only_computes(function: str) -> bool:
    if _PYTHON.fullmatch(function):
        return not _PYTHON_OUTSIDE.fullmatch(function)
    return bool(_COMPUTES.fullmatch(function)) and not _CXX_OUTSIDE.search(function)
