"""Builds our C sources as libraries. They are compiled on first use and kept in the user's cache folder, or
among the temporary files where that cannot be written."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files.user_dirs import cache_folder, kernel_folder

logger = logging.getLogger(__name__)

INSTALL = "install a C compiler (apt install gcc libc6-dev, dnf install gcc, apk add gcc musl-dev)"


class BuildError(Exception):
    """A library could not be built; the message has the reason and a remedy. Callers warn, or raise an error
    of their own."""


def build(
    folder: Path,
    sources: Sequence[str],
    headers: Sequence[str],
    flags: Sequence[str],
    libraries: Sequence[str] = (),
) -> Path:
    """Returns the path of the library, and compiles it unless a folder has it. Processes may do so at
    the same time: each renames its own file, and all files are alike. Raises BuildError."""
    compiler = next((path for name in ("gcc", "cc") if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"neither gcc nor cc is on the PATH; {INSTALL}")
    key = hashlib.sha256(
        "\0".join((*flags, compiler, str(os.stat(compiler).st_mtime_ns), _processor())).encode()
    )
    for name in (*sources, *headers):
        key.update((folder / name).read_bytes())
    name = f"{folder.name}-{key.hexdigest()[:16]}.so"
    cache = None
    with contextlib.suppress(ConfigError):
        cache = cache_folder()
        if (kept := cache / name).exists():  # an image may bring it, in a folder that cannot be written
            return kept
    try:
        kernels = kernel_folder()
    except ConfigError as error:
        raise BuildError(str(error)) from None
    target = kernels / name
    if not target.exists():
        if kernels != cache:
            logger.warning(
                "%s, so %s is compiled into %s, which may be emptied; set SHOAL_CACHE to a writable folder",
                f"the cache folder {cache} cannot be written" if cache else "the user has no home folder",
                name,
                kernels,
            )
        if sys.stderr.isatty():  # a person waits; a log needs no line
            print("compiling C kernels for this processor (once, some seconds)", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory(dir=kernels) as work:
                os.replace(_compile(compiler, folder, sources, flags, libraries, Path(work)), target)
        except OSError as error:
            raise BuildError(
                f"it cannot be kept in {kernels} ({error}); set SHOAL_CACHE to a folder that can be written"
            ) from None
    return target


def _compile(
    compiler: str,
    folder: Path,
    sources: Sequence[str],
    flags: Sequence[str],
    libraries: Sequence[str],
    work: Path,
) -> Path:
    """Compiles all sources at the same time, then links their objects."""
    objects = [str(work / f"{name}.o") for name in sources]
    jobs = [
        subprocess.Popen(
            [compiler, *flags, "-c", str(folder / name), "-o", target], stderr=subprocess.PIPE, text=True
        )
        for name, target in zip(sources, objects)
    ]
    errors = [(job.communicate()[1], job.returncode) for job in jobs]
    library = work / "library.so"
    if not any(code for _, code in errors):
        link = [compiler, "-shared", "-pthread", *objects, "-o", str(library), *libraries]
        linked = subprocess.run(link, stderr=subprocess.PIPE, text=True, check=False)
        errors = [(linked.stderr, linked.returncode)]
    for text, code in errors:
        if code:
            raise BuildError(f"{compiler} failed with exit code {code}: {text.strip()[-500:]}; {INSTALL}")
    return library


def _processor() -> str:
    """Describes the processor, because -march=native depends on it and different machines may share a cache
    folder."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    first = info.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.startswith(("model name", "flags", "Features", "CPU")))
