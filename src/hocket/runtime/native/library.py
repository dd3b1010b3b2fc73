"""Library: the C sources in this folder, compiled for this machine when first wanted, and kept.

    $XDG_CACHE_HOME/hocket/kernels/HASH.so, else ~/.cache/hocket/kernels/HASH.so

The hash is of the sources, the compiler's version, the flags and the processor's features, so that
a home directory may be shared. Compiling takes some seconds, once; a process that starts meanwhile
compiles too, and the last file replaces the others, whole at every moment. Without a C compiler,
where it fails, or with HOCKET_KERNELS=0, there is none, and PyTorch computes the same, slower;
`library_remark` has the reason and the fix. A processor may be taken for a lesser one, to see what
that would compute and how fast: HOCKET_KERNELS=avx2, for one without AVX-512, or =portable, for the
least that its compiler knows.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from hocket.spec.user_cache import cache_folder

VARIABLE = "HOCKET_KERNELS"
"""0: compile and use no kernels. A name of `FORMS`: those of a lesser processor."""
SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "half.c", "layer.c"))

# Only a compiler that hangs takes as long: ten seconds of a core are a minute where six programs
# share it.
_SECONDS = 900.0
# Sums may be reordered, or they would not be vectorised. That numbers are finite is not assumed,
# and how the processor treats the smallest numbers is not changed, as -ffast-math would.
_FLAGS = (
    *("-O3", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-signed-zeros", "-fassociative-math"),
)
FORMS = {"native": ("-march=native",), "avx2": ("-march=haswell",), "portable": ()}
"""Processors that kernels are compiled for, and the flags that say so."""
_WIDE = "-mprefer-vector-width=512"

_i, _f, _p = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS = {
    "hocket_rms_norm": [_p, _i, _i, _i, _i, _i, _p, _f, _f, _p],
    "hocket_silu_product": [_p, _i, _p, _i, _i, _i, _p],
    "hocket_rotate": [_p, _i, _i, _i, _i, _i, _p, _p, _p, _i],
    "hocket_store": [_p, _i, _i, _i, _i, _i, _p, _i, _p],
    "hocket_attend": [_p, _i, _i, _p, _p, _p, _i, _p, *[_i] * 7, _f, _f, _p, _p, _i, _p],
    "hocket_decode": [_p, _i, _p, _p, _p, _p, _p, _p, _i, _p, *[_i] * 5, _f, _p, _p, _i, _p],
    "hocket_attend_chunk": [_p, _i, _i, _p, _p, _p, *[_i] * 8, _f, _f, _p, _p, _i, _p],
    "hocket_product": [_p, _i, _i, _p, _i, _i, _i, _p, _i, _p],
    "hocket_half_product": [_p, _i, _i, _p, _i, _i, _i, _p, _i, _p, _p],
    "hocket_half_scratch": [_i, _i],
    "hocket_largest": [_p, _i, _i, _i, _p, _p],
    "hocket_sum": [_p, _p, _i, _p, _p],
    "hocket_layer": [_p, _p, _p, _p],
    "hocket_layer_scratch": [_p, _i, _i],
}
_COUNTS = ("hocket_half_scratch", "hocket_sum", "hocket_layer", "hocket_layer_scratch")
"""Those that return a number; the others return nothing."""


@functools.cache
def library(form: str | None = None) -> ctypes.CDLL | None:
    """The kernels; None where there are none. `form`: of `FORMS`; None: what the environment says,
    else native."""
    asked = os.environ.get(VARIABLE)
    if asked == "0":
        return None
    if form is None:
        form = asked if asked in FORMS else "native"
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        found = ctypes.CDLL(str(_built(compiler, form)))
    except (OSError, subprocess.SubprocessError):
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, _i if name in _COUNTS else None
    return found


def library_remark() -> str | None:
    """Why this machine has no kernels, and the fix; None where it has them, or was asked for none.

    Compiles them, if that has not been done: ranks that start later find the file.
    """
    if os.environ.get(VARIABLE) == "0":
        return None
    effect = "PyTorch's operations compute the same, slower"
    compiler = _compiler()
    if compiler is None:
        named = os.environ.get("CC")
        wrong = f"CC={named} is not a program" if named else "no C compiler (gcc, clang, cc)"
        return f"no kernels in C: {wrong}; {effect}. Fix: apt-get install gcc libc6-dev, or set CC"
    asked = os.environ.get(VARIABLE)
    try:
        _built(compiler, asked if asked in FORMS else "native")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines()
        said = next((line for line in lines if "error" in line), f"exit code {error.returncode}")
        wrong = f"{compiler[0]} cannot compile them ({said})"
        fix = "apt-get install libc6-dev, or CC=another compiler"
    except subprocess.TimeoutExpired as error:
        wrong = f"{compiler[0]} took more than {error.timeout:g} s"
        fix = "start it again when the machine is less busy"
    except (OSError, subprocess.SubprocessError) as error:
        wrong, fix = f"they cannot be kept in {library_folder()} ({error})", "XDG_CACHE_HOME=DIR"
    else:
        return None
    return f"no kernels in C: {wrong}; {effect}. Fix: {fix}"


def library_folder() -> Path:
    """Where compiled kernels of this user are kept."""
    return cache_folder("kernels")


def _compiler() -> list[str] | None:
    """The words that call a C compiler: $CC, else the first that is there."""
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [["gcc"], ["clang"], ["cc"]]:
        path = shutil.which(words[0])
        if path is not None:
            return [path, *words[1:]]
    return None


def _built(compiler: list[str], form: str) -> Path:
    """The library's file, compiled for a processor of `FORMS` unless it is there.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be compiled or kept.
    """
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True
    ).stdout
    flags = [*FORMS[form], *_FLAGS]
    if form == "native" and "avx512f" in _features():
        flags.append(_WIDE)
    sources = [source.read_bytes() for source in SOURCES]
    known = [*sources, version, " ".join(flags).encode(), _features().encode()]
    digest = hashlib.sha256(b"\0".join(known)).hexdigest()[:24]
    file = library_folder() / f"{digest}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=file.parent) as aside:
            made = Path(aside) / "kernels.so"
            subprocess.run(
                [*compiler, *flags, *map(str, SOURCES), "-o", str(made)],
                capture_output=True,
                timeout=_SECONDS,
                check=True,
            )
            made.replace(file)
    if file.stat().st_uid != os.getuid():
        raise PermissionError(f"{file} belongs to another user")
    return file


@functools.cache
def _features() -> str:
    """What code for this processor may use, as its kernel tells; else its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    relevant = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(relevant[:2])
