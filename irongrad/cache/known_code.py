"""What is known of code that reads files unseen: events, functions, and packages with native code."""

from __future__ import annotations

# Audit events of actions that leave no trace on disk, with the words of the refusal.
REFUSED = {
    "builtins.input": "asks at the terminal",
    "ctypes.dlopen": "loads a library",
    "os.exec": "starts a process",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.remove": "removes a file",
    "os.rename": "renames a file",
    "os.system": "starts a process",
    "os.truncate": "writes a file",
    "socket.bind": "uses the network",
    "socket.connect": "uses the network",
    "socket.getaddrinfo": "uses the network",
    "socket.gethostbyname": "uses the network",
    "socket.gethostname": "asks for the machine's name",
    "socket.sendto": "uses the network",
    "sqlite3.connect": "opens a database",
    "subprocess.Popen": "starts a process",
}
# Functions of `os` that inspect files without an audit event.
LOOKS = ("stat", "lstat", "access", "readlink")
# Sources of random numbers that differ in every process. The generators themselves start at a seed
# (`cli.compile.load_step`).
ENTROPY = (("os", "urandom"), ("random", "_urandom"), ("torch", "seed"))
_FROM_VOCABULARIES = ("BPE", "WordPiece", "WordLevel")
# Functions whose native code opens the files among their arguments; what is not installed has none.
READERS = (
    ("safetensors", "safe_open"),
    ("torch", "from_file"),
    ("torch", "UntypedStorage.from_file"),
    ("torch", "_C.import_ir_module"),
    ("torch.export.pt2_archive._package", "PT2ArchiveReader.__init__"),
    ("torch.package", "PackageImporter.__init__"),
    ("tokenizers", "Tokenizer.from_file"),
    ("tokenizers", "Tokenizer.train"),
    *(("tokenizers.models", f"{model}.{name}") for model in _FROM_VOCABULARIES for name in ("from_file", "read_file")),
    # They take names of files in place of a vocabulary, too.
    *(("tokenizers.models", f"{model}.__init__") for model in _FROM_VOCABULARIES),
    ("pyarrow.lib", "encode_file_path"),  # pyarrow.lib calls it for each file that it opens or maps (io.pxi)
)
# Functions whose native code opens files that no argument names.
UNFOLLOWED = (("tokenizers", "Tokenizer.from_pretrained"),)
# Packages whose native code opens no files but through the readers above; of others, `way_outside` tells. The empty
# name stands for Python's own modules, which report their files. IREE's Python imports yaml to look into linalg
# operations. Pillow gives its libraries memory and open files. Wheels have libraries in a folder beside the package.
KNOWN = frozenset(
    {"", "iree", "ml_dtypes", "msgspec", "numpy", "psutil", "safetensors", "scipy", "sklearn", "torch", "torch_mlir"}
    | {"yaml", "tokenizers", "PIL", "pandas", "pyarrow"}
    | {f"{name}.libs" for name in ("iree_base_compiler", "iree_base_runtime", "numpy", "pillow", "scipy")}
    | {"scikit_learn.libs"}
)
# The exceptions in these packages: SciPy's reader of Matrix Market files, imported by its first call, and Pillow's
# readers of fonts, colour profiles and the screen, and Arrow's own file systems and servers.
UNKNOWN_MODULES = (
    "scipy.io._fast_matrix_market._fmm_core",
    "PIL._imagingft",
    "PIL._imagingcms",
    "PIL._imagingtk",
    "PIL.ImageGrab",
    "pyarrow._dataset",
    "pyarrow._flight",
    "pyarrow._fs",
)
