"""`WeightExports`: exports an engine's weights to workers that start with the same weights and would
otherwise read them from a disk. engine/runner/rank_export.py copies them.

`shoal serve` in a fleet uses them (weights_from_peers), so that a new worker starts in seconds; they are not
built on kv/transfer's transports, whose unit is a KV block. The ranks open their memory for the first reader
and close it after the last one. An export whose reader died ends after EXPORT_S seconds. Neither side waits
for the other (engine/runner/rank_export.py says why that is safe).
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence

import torch

from shoal import __version__
from shoal.api import WEIGHTS
from shoal.config import ResolvedConfig
from shoal.engine.pause_state import PauseState
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.runner.rank_export import WeightsExport, decode, encode
from shoal.engine.step_part import StepPart
from shoal.errors import CheckpointError, UnavailableError
from shoal.stats import Stats
from shoal.weights.fingerprint import tensors_fingerprint
from shoal.weights.loader import lies_by_shape
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)

EXPORT_S = 600.0  # A worker that takes longer to start has died.


class WeightExports(StepPart):
    """`checkpoint()`: the checkpoint of the weights, if its files are unchanged; otherwise None. Every call
    is made between steps, and the exports end before the weights change or are released."""

    def __init__(
        self,
        config: ResolvedConfig,
        ranks: Ranks,
        paused: PauseState,
        checkpoint: Callable[[], CheckpointFiles | None],
    ) -> None:
        self._config, self._ranks, self._paused, self._checkpoint = config, ranks, paused, checkpoint
        self._ends: dict[str, float] = {}  # reader -> when its export ends
        self._offers: list[bytes] = []  # one RankExport for each rank, while there are readers
        # the checkpoint and its fingerprint, which is read from disk
        self._name: tuple[CheckpointFiles, bytes] | None = None

    def export(self, name: bytes, reader: str) -> bytes:
        """Exports the weights of this name (weights/fingerprint.py), in place of any earlier export to this
        reader. Raises UnavailableError if the engine has other weights, or weights that cannot be
        exported."""
        self._paused.check_awake()
        if self._paused.weights_lost is not None:
            raise UnavailableError(self._paused.weights_lost)
        files = self._checkpoint()
        if files is None:
            raise UnavailableError(
                "the weights of this engine differ from every checkpoint on its disk, so they cannot be "
                "exported"
            )
        if not lies_by_shape(files):
            raise UnavailableError(
                f"the memory layout of the weights of {files.path} depends on their values"
            )
        if self._name is None or self._name[0] is not files:
            self._name = files, tensors_fingerprint(files)
        if self._name[1] != name:
            raise UnavailableError(f"this engine has other weights: {files.path}")
        self._settle()
        if not self._ends:
            self._open()
        self._ends[reader] = time.monotonic() + EXPORT_S
        return encode(WeightsExport(layout_of(self._config), self._offers))

    def end(self, reader: str) -> None:
        """Ends the export to this reader, if there is one."""
        if self._ends.pop(reader, None) is not None and not self._ends:
            self._close()

    def before_sleep(self, tags: Sequence[str]) -> None:
        if WEIGHTS in tags:
            self._withdraw_all()

    def weights_change(self) -> None:
        self._withdraw_all()

    def fill_in(self, stats: Stats) -> None:
        self._settle()  # here, because a monitored engine is asked for its stats regularly

    def _withdraw_all(self) -> None:
        """Ends all exports. A reader in the middle of a read finds wrong checksums."""
        if self._ends:
            self._ends.clear()
            self._close()

    def _settle(self) -> None:
        """Ends the exports of readers that have not reported back in time."""
        for reader in [reader for reader, end in self._ends.items() if end < time.monotonic()]:
            self.end(reader)

    def _open(self) -> None:
        self._offers, errors = self._ranks.each(commands.EXPORT_WEIGHTS)
        if errors:
            self._close()
            raise UnavailableError(f"the weights cannot be exported: {errors[0]}")

    def _close(self) -> None:
        self._offers = []
        self._ranks.call(commands.END_WEIGHT_EXPORT)


def layout_of(config: ResolvedConfig) -> str:
    """Names everything that decides the memory layout of the ranks' weights, except for the checkpoint
    itself."""
    if config.device == "cuda":
        machine = f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}"
    else:
        machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    packing = config.quantization or ("packed" if config.keep_quantized else "plain")
    return (
        f"shoal {__version__}, {config.device} ({machine}), {config.dtype}, {packing}, "
        f"tensor_parallel_size {config.tensor_parallel_size}"
    )


def accepted(data: bytes, config: ResolvedConfig, files: CheckpointFiles) -> list[bytes]:
    """Returns the RankExports of a WeightsExport if an engine with this config has the same memory layout.
    Otherwise logs why not, and returns []."""
    try:
        found = decode(data, WeightsExport)
        if found.layout != (ours := layout_of(config)):
            raise CheckpointError(f"their layout is {found.layout}, and this engine's is {ours}")
        if not lies_by_shape(files):
            raise CheckpointError("their memory layout depends on their values")
        if len(found.ranks) != config.tensor_parallel_size:
            raise CheckpointError(
                f"they have {len(found.ranks)} ranks, and this engine has {config.tensor_parallel_size}"
            )
    except CheckpointError as error:
        logger.warning(
            "the weights of the other worker cannot be used: %s; weights are read from files", error
        )
        return []
    return found.ranks
