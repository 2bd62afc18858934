"""Models on the Hugging Face hub: chooses a repository's model files, and downloads them into the cache of
huggingface_hub. hub_names.py parses names.

It asks the hub for the list of files first, and for config.json: a model that Shoal cannot run is refused
before its weights are downloaded. All files come from the commit of the list.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from shoal.errors import CheckpointError
from shoal.files.json_file import read_object
from shoal.kernels.quant.ggml_types import TYPES
from shoal.models.config_json import architecture_of, config_from_json, overridden
from shoal.models.registry import BY_GGUF
from shoal.weights.hub_names import HubModel

logger = logging.getLogger(__name__)

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_DUPLICATES = ["*/*", "consolidated*"]  # the same weights in their authors' own layout
LIST_S = 10.0  # timeout of the hub's list of files
# The order in which a GGUF file is chosen without a tag: four bits are the usual compromise.
USUAL = (
    *("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1", "Q6_K", "Q8_0"),
    *("BF16", "F16", "F32"),
)
QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|BF16|F16|FP16|F32))(?=[-.]|$)", re.IGNORECASE
)
QUANT_FAMILY = re.compile(r"(?:I?Q|TQ|MXFP|B?F)\d+")
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
NO_MODELS = ("mmproj", "imatrix")  # other files with the suffix .gguf


@dataclass(frozen=True, slots=True)
class _Listing:
    """A repository at one commit. `gguf_architecture`: the architecture of its GGUF files, if the hub knows
    it."""

    commit: str
    sizes: Mapping[str, int]
    gguf_architecture: str | None


def is_model_file(name: str) -> bool:
    """Says if Shoal reads a file of a model's folder."""
    is_duplicate = any(fnmatch(name, pattern) for pattern in HUB_DUPLICATES)
    return not is_duplicate and any(fnmatch(name, pattern) for pattern in HUB_FILES)


def download(
    model: HubModel,
    revision: str | None,
    download_dir: str | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    is_checked: bool = True,
    more_files: Sequence[str] = (),
) -> Path:
    """Returns a model's folder in the cache, or its .gguf file. If the hub cannot be reached, a cached model
    is used, with a warning. `is_checked`: a model that Shoal cannot run is refused, by its config.json with
    `overrides` in it. `more_files`: names of further files to fetch where the repository has them. Raises
    CheckpointError."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    with _asking(model, revision, download_dir):
        try:
            listing = _list(model.repo, revision)
        except Exception as error:  # huggingface_hub raises errors of several families
            if (path := _cached(model, revision, download_dir)) is None:
                raise
            if not isinstance(error, OfflineModeIsEnabled):  # which the user has chosen
                logger.warning("the hub cannot be asked for %s (%s); %s is used", model, _line(error), path)
            return path
        file = _gguf_of(model, list(listing.sizes))
        if is_checked:
            _check_architecture(model, listing, file, download_dir, overrides or {})
        if file is not None:
            found = hf_hub_download(model.repo, file, revision=listing.commit, cache_dir=download_dir)
        else:
            found = snapshot_download(
                model.repo,
                revision=listing.commit,
                cache_dir=download_dir,
                allow_patterns=[*HUB_FILES, *more_files],
                ignore_patterns=HUB_DUPLICATES,
            )
        _keep_ref(model, revision, listing.commit, download_dir)
        return Path(found)


def cached(model: HubModel, download_dir: str | None) -> Path | None:
    """Returns a model's folder or .gguf file in the cache; None if it is missing or incomplete. Downloads
    nothing. Raises CheckpointError for a name that the hub does not allow."""
    with _asking(model, None, download_dir):
        return _cached(model, None, download_dir)


def bytes_to_download(model: HubModel, download_dir: str | None) -> int:
    """Returns the bytes that a download would transfer, without the files that are already cached. Raises
    CheckpointError if the hub does not have the model, or cannot be reached."""
    from huggingface_hub import try_to_load_from_cache

    with _asking(model, None, download_dir):
        listing = _list(model.repo, None)
        file = _gguf_of(model, list(listing.sizes))
        wanted = [name for name in listing.sizes if is_model_file(name)] if file is None else [file]
        missing = [
            name
            for name in wanted
            if not isinstance(try_to_load_from_cache(model.repo, name, download_dir, listing.commit), str)
        ]
        return sum(listing.sizes[name] for name in missing)


def _list(repo: str, revision: str | None) -> _Listing:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    hub = HfApi()
    info = hub.model_info(repo, revision=revision, timeout=LIST_S, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if info.siblings is None:  # some mirrors list files only as a tree
        tree = hub.list_repo_tree(repo, recursive=True, revision=info.sha)
        sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    known = getattr(info, "gguf", None) or {}
    return _Listing(info.sha or "", sizes, known.get("architecture"))


def _cached(model: HubModel, revision: str | None, download_dir: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def folder(patterns: list[str]) -> Path:
        """Raises LocalEntryNotFoundError unless all files of these patterns are there."""
        found = snapshot_download(
            model.repo,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=HUB_DUPLICATES,
            local_files_only=True,
        )
        return Path(found)

    try:
        root = folder([])
        file = _gguf_of(model, [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()])
        return root / file if file is not None else folder(HUB_FILES)
    except (LocalEntryNotFoundError, CheckpointError):  # CheckpointError: other files of it are there
        return None


def _keep_ref(model: HubModel, revision: str | None, commit: str, download_dir: str | None) -> None:
    """Notes in the cache the commit of a branch or tag, as huggingface_hub does when it resolves one itself:
    it reads the note when the hub cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    root = Path(download_dir or constants.HF_HUB_CACHE).expanduser()
    name = revision or constants.DEFAULT_REVISION
    ref = root / repo_folder_name(repo_id=model.repo, repo_type="model") / "refs" / name
    with contextlib.suppress(OSError):  # a cache that cannot be written serves what it has
        if name != commit and (not ref.exists() or ref.read_text() != commit):
            ref.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=ref.parent, delete=False) as file:
                file.write(commit)
            Path(file.name).replace(ref)


# Which files


def _gguf_of(model: HubModel, names: Sequence[str]) -> str | None:
    """Returns the GGUF file to use from a repository with these files; None: its safetensors. Raises
    CheckpointError that lists the choices."""
    files = [name for name in names if name.endswith(".gguf") and not _is_no_model(name)]
    if model.tag is None and (
        not files or any(is_model_file(n) and n.endswith(".safetensors") for n in names)
    ):
        if "config.json" not in names:
            raise CheckpointError(
                f"{model} on the hub holds neither config.json nor a .gguf file; Shoal reads safetensors in "
                "the layout of transformers, and GGUF: name such a repository"
            )
        return None
    if not files:
        raise CheckpointError(
            f"{model.repo} on the hub holds no .gguf file, so there is no {model.tag}; leave "
            f":{model.tag} out, or name a repository of GGUF files (such as {model.repo}-GGUF, if it exists)"
        )
    chosen = _usual(files) if model.tag is None else _tagged(files, model.tag)
    ways = ", ".join(f"{model.repo}:{tag}" for tag in _tags(files))
    if not chosen:
        raise CheckpointError(f"{model} is not on the hub; its repository has {ways or 'other files'}")
    if len(chosen) > 1:
        raise CheckpointError(
            f"{model} on the hub may be {' or '.join(sorted(chosen))}; name one: {model.repo}:FILE.gguf"
        )
    [file] = chosen
    if not _is_read(_quant(file)):
        raise CheckpointError(
            f"{model}: Shoal does not read {_quant(file)}; of its repository it reads {ways or 'no file'}"
        )
    if PART.search(file):
        raise CheckpointError(
            f"{model} is cut into several files on the hub, which Shoal does not read ({file}); "
            + (f"take {ways}, or join" if ways else "join")
            + " them with llama-gguf-split --merge and name the result"
        )
    return file


def _is_no_model(name: str) -> bool:
    return any(word in PurePosixPath(name).name.lower() for word in NO_MODELS)


def _quant(name: str) -> str:
    """Returns the quantization in a file's name, in capitals; "" without one."""
    found = QUANT.findall(PurePosixPath(PART.sub("", name)).name.removesuffix(".gguf"))
    return found[-1].upper().replace("FP", "F") if found else ""


def _is_read(quant: str) -> bool:
    """Says if Shoal reads files of this quantization. A file's tensors have several types, whose names begin
    with the same letters."""
    family = QUANT_FAMILY.search(quant)
    return family is None or any(kind.name.startswith(family[0]) for kind in TYPES.values())


def _tags(files: Sequence[str]) -> list[str]:
    """Returns the possible tags after the colon, for undivided files that Shoal reads, the usual ones
    first."""
    quants = {_quant(file) for file in files if not PART.search(file)} - {""}
    return sorted(filter(_is_read, quants), key=lambda quant: (_rank(quant), quant))


def _rank(quant: str) -> int:
    return USUAL.index(quant) if quant in USUAL else len(USUAL)


def _usual(files: Sequence[str]) -> list[str]:
    """Returns the files of the most usual quantization: undivided ones that Shoal reads, if any."""
    whole = [file for file in files if not PART.search(file) and _is_read(_quant(file))]
    if not whole:
        return list(files[:1])
    best = min((_rank(_quant(file)), _quant(file)) for file in whole)
    return [file for file in whole if (_rank(_quant(file)), _quant(file)) == best]


def _tagged(files: Sequence[str], tag: str) -> list[str]:
    """Returns the files with this name, or else with this quantization; a divided file counts by its first
    part."""
    files = [file for file in files if not PART.search(file) or "-00001-of-" in file]
    quant = tag.upper().replace("FP", "F")
    return (
        [file for file in files if tag in (file, PurePosixPath(file).name)]
        or [file for file in files if _quant(file) == quant]
        or [file for file in files if _quant(file) == f"UD-{quant}"]
    )


def _check_architecture(
    model: HubModel,
    listing: _Listing,
    file: str | None,
    download_dir: str | None,
    overrides: Mapping[str, Any],
) -> None:
    """Raises CheckpointError for a model that Shoal cannot run, before its weights are downloaded. Its
    config.json goes into a temporary folder, so that nothing of such a model stays."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if file is not None and listing.gguf_architecture is not None:
        if listing.gguf_architecture not in BY_GGUF:
            raise CheckpointError(
                f"{model}: GGUF architecture {listing.gguf_architecture!r:.80} is not supported; these are: "
                f"{', '.join(BY_GGUF)}"
            )
        return
    if "config.json" not in listing.sizes:
        return  # the GGUF file's own header is checked later
    path = try_to_load_from_cache(model.repo, "config.json", download_dir, listing.commit)
    with tempfile.TemporaryDirectory(prefix="shoal-config-") as folder:
        if not isinstance(path, str):
            path = hf_hub_download(model.repo, "config.json", revision=listing.commit, local_dir=folder)
        config, where = read_object(Path(path)), f"{model.repo}/config.json"
    if file is None:
        config_from_json(overridden(config, overrides), where)
    elif config.get("architectures"):
        architecture_of(config, where)


# Errors


@contextlib.contextmanager
def _asking(model: HubModel, revision: str | None, download_dir: str | None) -> Iterator[None]:
    """Turns every error of huggingface_hub into a CheckpointError. Its errors have no common base: the
    errors of its HTTP client are OSErrors (requests, in older releases) or are not (httpx), and the package
    that brings the weights, hf_xet, raises RuntimeError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001   see above
        raise CheckpointError(_reason(model, revision, download_dir, error)) from None


def _reason(model: HubModel, revision: str | None, download_dir: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub could not be asked
    repo, status = model.repo, getattr(getattr(error, "response", None), "status_code", None)
    local = "or name a local folder or .gguf file"
    # GatedRepoError is a RepositoryNotFoundError.
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo!r} is gated: ask for access at https://huggingface.co/{repo}, then log in with `hf auth "
            f"login` (or set HF_TOKEN), {local}"
        )
    names_part = isinstance(error, errors.EntryNotFoundError | errors.RevisionNotFoundError)
    is_missing = status == HTTPStatus.NOT_FOUND and not names_part
    if isinstance(error, errors.RepositoryNotFoundError) or is_missing:
        return (
            f"the Hugging Face hub has no model {repo!r}, or a private one; check the spelling, log in with "
            f"`hf auth login` (or set HF_TOKEN) if it is private, {local}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{repo!r} has no revision {revision!r} on the hub; give a branch, a tag or a commit of it, "
            f"leave --revision out, {local}"
        )
    if isinstance(error, errors.HFValidationError):
        return f"the hub allows no model name {repo!r}: {_line(error)}; name it as org/name, {local}"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return (
            f"the Hugging Face hub refuses {repo!r} ({_line(error)}); check HF_TOKEN or log in with `hf auth "
            f"login`, ask for access at https://huggingface.co/{repo} if it is gated, {local}"
        )
    folder = download_dir or constants.HF_HUB_CACHE
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"there is no room for {repo!r} in {folder} ({_line(error)}); make room, choose another folder "
            f"(--download-dir, HF_HUB_CACHE), {local}"
        )
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS):
        return (
            f"{repo!r} cannot be written into {folder} ({_line(error)}); choose another folder "
            f"(--download-dir, HF_HUB_CACHE), {local}"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{str(model)!r} is not in the cache, and HF_HUB_OFFLINE keeps Shoal off the network; unset it, "
            f"{local}"
        )
    is_unreachable = status is None and not isinstance(error, RuntimeError | ValueError)
    if isinstance(error, errors.LocalEntryNotFoundError) or is_unreachable:
        return (
            f"{str(model)!r} is neither in the cache nor to be had from the Hugging Face hub, which cannot "
            f"be reached ({_line(error)}); check the network, {local}"
        )
    return f"{repo!r} cannot be had from the Hugging Face hub ({_line(error)}); try again later, {local}"


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
