"""`Weights`: the weights of a running engine: their source, version, completeness, and updates.
engine/runner/rank_weights.py loads them on each rank; a checkpoint of another model is engine/core.py's.

New weights are written into the old ones' memory, so that captured graphs stay valid. What does not fit is
refused before anything changes. An update that breaks off in the middle leaves an engine that refuses to
generate until a good one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shoal.config import ResolvedConfig
from shoal.engine.pause_state import PauseState
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.runner.cache_plan import cache_scales
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_loop import StepLoop
from shoal.engine.step_part import Parts
from shoal.errors import CheckpointError, ConfigError, UnavailableError
from shoal.models.shapes import checkpoint_shapes
from shoal.weights.check import verify_weights
from shoal.weights.heads.mtp_files import MtpFiles
from shoal.weights.kv_scales import name_of
from shoal.weights.loader import check_shapes, is_derived, is_draft
from shoal.weights.source import CheckpointFiles, resolve
from shoal.weights.store import is_url
from shoal.weights.trainer_names import trainer_parts
from shoal.weights.transfer import Handle, check_group, parse_tensors
from shoal.weights.update import check_tensor, difference, fingerprint, packing_difference

logger = logging.getLogger(__name__)

Outcomes = tuple[list[None], list[Exception]]  # the result of Ranks.each for a command without one


class Weights:
    """The weights of one engine, loaded from `files`. Every call is made between steps. Running requests
    continue under the new weights: their KV is computed again, and the prefix cache is reset."""

    def __init__(
        self,
        config: ResolvedConfig,
        files: CheckpointFiles,
        ranks: Ranks,
        loop: StepLoop,
        scheduler: Scheduler,
        parts: Parts,
        paused: PauseState,
    ) -> None:
        self.version = 0  # the number of updates
        self._config, self._model_config, self._head = config, files.config, files.head
        self._ranks, self._loop, self._scheduler = ranks, loop, scheduler
        self._parts, self._paused = parts, paused
        # the checkpoint whose packing the weights have; None: plain weights, or fp8 quantized from plain ones
        self._packed_as = files if config.keep_quantized and not config.quantizes_weights else None
        self._awaited: set[str] = set()  # the tensors of lost weights that have not been loaded again yet
        self._source: CheckpointFiles | None = None  # the whole checkpoint that the weights equal
        self._fingerprint: list[tuple[str, int, int]] = []
        if not self._is_dummy(files):
            self._remember(files)

    # Updates

    def find(self, source: str) -> CheckpointFiles:
        """The checkpoint of this name: a folder, a file, a repository, or what a store has now, with the
        draft head that the engine uses with it. Raises CheckpointError."""
        config = self._config
        revision = config.revision if source == config.model and not is_url(source) else None
        files = resolve(source, revision, config.download_dir, overrides=config.hf_overrides)
        files = files if files.file is not None else files.overridden(config.hf_overrides)
        return files.following(self._head)

    def difference(self, files: CheckpointFiles) -> str | None:
        """Returns why these weights cannot be written into the memory of the old ones: another model, or
        another packing. None: they can."""
        if self._is_dummy(files):
            return None
        why = difference(self._model_config, files.config)
        if why is None and self._packed_as is not None:
            why = packing_difference(self._packed_as, files)
        if why is None and isinstance(self._head, MtpFiles) and isinstance(files.head, MtpFiles):
            why = self._head.difference(files.head)
        scales = self._ranks.runner.cache.plan.specs[0].scales
        if why is None and scales and name_of(cache_scales(self._config, files)) != scales:
            why = "its k_scale and v_scale differ from the scales of the engine's KV cache"
        return why

    def update(self, files: CheckpointFiles) -> int:
        """Loads a checkpoint that has no `difference`. Returns the new version. Raises CheckpointError; if
        loading had begun, nothing runs until a good update."""
        self._paused.check_awake()
        dummy = self._is_dummy(files)
        if not dummy:
            check_shapes(files)
            if self._config.check_weights:
                verify_weights(files)
        path = str(files.path)
        self._load(f"from {path}", None, lambda: self._ranks.each(commands.LOAD_CHECKPOINT, path, dummy))
        if not dummy:
            self._remember(files)
        self._head = files.head
        logger.info("weights version %d: %s", self.version, files.path)
        return self.version

    def update_from_tensors(self, tensors: Mapping[str, torch.Tensor] | Sequence[Handle]) -> int:
        """Loads whole tensors under their Hugging Face names, some or all of them: tensors of this process by
        name, or the SharedTensors.handles of another. Returns the new version. Raises CheckpointError,
        ConfigError."""
        if isinstance(tensors, Mapping):
            self._update_from_own(tensors)
        else:
            self._update_from_shared(tensors)
        return self.version

    def _update_from_own(self, given: Mapping[str, torch.Tensor]) -> None:
        """From tensors of this process, which rank 0 sends to the others. A multimodal model's
        tensors may come as they are: the engine leaves out tensors of its encoders."""
        for name, tensor in given.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                raise ConfigError(
                    f"{name!s:.80} must be a tensor with data, got {tensor!r:.80}; give tensors by name"
                )
        tensors = {
            part.name: part.take(tensor.detach())
            for name, tensor in given.items()
            for part in trainer_parts(name, tuple(tensor.shape), self._model_config)
        }
        names = self._check_tensors(
            [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in given.items()]
        )
        tensors = {name: tensors[name] for name in names}
        described = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in tensors.items()
        ]
        ranks = self._ranks
        load_own = partial(ranks.runner.weights.load_tensors, tensors)
        self._load(
            "from tensors", names, lambda: ranks.each_with(load_own, commands.LOAD_BROADCAST, described)
        )

    def _update_from_shared(self, given: Sequence[Handle]) -> None:
        """From tensors of another process, which every rank opens for itself."""
        try:
            handles = list(given)
            listed = parse_tensors(*([h[key] for h in handles] for key in ("name", "dtype", "shape")))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"tensors are neither a dict of tensors nor SharedTensors.handles ({error!r}); give either"
            ) from None
        names = self._check_tensors(
            [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in listed]
        )
        self._load(
            "from shared tensors",
            names,
            lambda: self._ranks.each(commands.LOAD_SHARED, handles, sorted(names)),
        )

    def init_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins a trainer's process group; rank r of this engine joins as rank_offset + r. Returns when all
        members have joined. Raises ConfigError for impossible values, UnavailableError if they do not
        join."""
        runner = self._ranks.runner
        check_group(port, rank_offset + runner.tp.size - 1, world_size, backend, runner.device)
        if group_name in self.groups:
            raise ConfigError(
                f"group_name {group_name!r} is in use; destroy that weights update group first, or choose "
                "another name"
            )
        _, errors = self._ranks.each(
            commands.JOIN_WEIGHTS_GROUP, address, port, rank_offset, world_size, group_name, backend
        )
        if errors:
            self._ranks.each(commands.LEAVE_WEIGHTS_GROUP, group_name)
            raise UnavailableError(
                f"the trainer's process group {group_name!r} at {address}:{port} was not formed: {errors[0]}"
            )

    def destroy_group(self, group_name: str) -> None:
        """Leaves the group. Raises ConfigError if the engine is in no group of this name."""
        self._check_group(group_name)
        self._ranks.each(commands.LEAVE_WEIGHTS_GROUP, group_name)

    def update_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]], group_name: str
    ) -> int:
        """Receives whole tensors that rank 0 of the group broadcasts in this order. Returns the new
        version."""
        self._check_group(group_name)
        listed = parse_tensors(names, dtypes, shapes)
        taken = self._check_tensors(
            [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in listed]
        )
        self._load(
            f"over the group {group_name!r}",
            taken,
            lambda: self._ranks.each(commands.RECEIVE_WEIGHTS, listed, sorted(taken), group_name),
        )
        return self.version

    def check(self) -> dict[str, str]:
        """A checksum of each tensor under "rank{i}.{name}"."""
        self._paused.check_awake()
        sums = self._ranks.call(commands.CHECKSUMS)
        return {f"rank{rank}.{name}": value for rank, own in enumerate(sums) for name, value in own.items()}

    @property
    def groups(self) -> list[str]:
        """The names of the trainers' process groups that this engine is in."""
        return sorted(self._ranks.runner.weights.groups)

    # For sleep (engine/lifecycle/sleep.py)

    def lose(self, reason: str) -> None:
        """Notes that the weights in memory are incomplete. Nothing runs until all tensors have been loaded
        again."""
        self._paused.weights_lost = f"the weights are not there: {reason}; call update_weights first"
        self._awaited = set(self._shapes)
        self._source = None

    def unchanged(self) -> bool:
        """True if reading the checkpoint again would restore the weights in memory."""
        if self._source is not None and self._paused.weights_lost is None:
            try:
                return fingerprint(self._source) == self._fingerprint
            except CheckpointError:
                pass
        logger.warning(
            "the weights differ from the checkpoint on disk: sleep keeps them in host memory instead"
        )
        return False

    @property
    def checkpoint(self) -> CheckpointFiles | None:
        """The checkpoint of the weights, if its files are unchanged since it was read."""
        if self._source is not None:
            with contextlib.suppress(CheckpointError):
                if fingerprint(self._source) == self._fingerprint:
                    return self._source
        return None

    def reread(self) -> list[Exception]:
        """Reads the checkpoint again after a sleep that relied on it. Returns the ranks' errors."""
        source = self._source
        assert source is not None
        if not self.unchanged():
            self.lose(f"{source.path} changed while the engine slept and relied on it")
            return []
        _, errors = self._ranks.each(commands.LOAD_CHECKPOINT, str(source.path), False)
        return errors

    # Inside

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(checkpoint_shapes(self._model_config))

    def _is_dummy(self, files: CheckpointFiles) -> bool:
        """True if these files are the engine's own model under load_format "dummy": its weights are
        random."""
        config = self._config
        return config.load_format == "dummy" and str(files.path) == str(
            resolve(config.model, config.revision, config.download_dir, overrides=config.hf_overrides).path
        )

    def _remember(self, files: CheckpointFiles) -> None:
        self._source, self._fingerprint = files, fingerprint(files)

    def _check_group(self, group_name: str) -> None:
        if group_name not in self.groups:
            raise ConfigError(
                f"weights update group {group_name!r} does not exist, only {self.groups}; "
                "call init_weights_update_group first"
            )

    def _check_tensors(self, listed: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> set[str]:
        """Returns the decoder's names of the tensors to load, of those that a trainer has listed. Raises
        CheckpointError, before anything changes, for what does not fit."""
        self._paused.check_awake()
        if self._packed_as is not None:
            raise CheckpointError(
                f"the engine's weights are packed from {self._packed_as.path}, so plain tensors can't "
                "replace them; build it with an explicit dtype, or name a GGUF file"
            )
        shapes, config, names = self._shapes, self._model_config, set()
        for sent, dtype, shape in listed:
            for part in trainer_parts(str(sent), shape, config):
                name = part.name
                if is_derived(name, config) or is_draft(name, config):
                    continue
                if name not in shapes and 0 in part.shape:  # an expert that the model does not have
                    continue
                check_tensor(name, shapes.get(name), part.shape, dtype)
                if name in names:
                    raise CheckpointError(f"{name} is given twice; give each tensor once")
                names.add(name)
        return names

    def _load(self, where: str, names: set[str] | None, load: Callable[[], Outcomes]) -> None:
        """`load` has the ranks load the tensors of these names (None: all of them)."""
        self._loop.drain()
        self._scheduler.preempt_all()
        self._scheduler.reset_prefix_cache()
        for part in self._parts:
            part.weights_change()
        broke_off = f"the update {where} broke off"
        try:
            _, errors = load()
        except BaseException:  # an interrupt, or a rank that died: it is unknown which tensors are new
            self.lose(broke_off)
            raise
        if errors:
            self.lose(broke_off)
            error = errors[0]
            if isinstance(error, CheckpointError):
                raise error
            raise CheckpointError(f"{broke_off}: {error}") from error
        self._source = None
        self._awaited = self._awaited - names if names is not None else set()
        if not self._awaited:
            self._paused.weights_lost = None
        self.version += 1
