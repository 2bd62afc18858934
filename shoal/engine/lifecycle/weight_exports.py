"""Loans of an engine's weights to workers that start with the same ones and would else read them from a
disk.

The ranks open their memory for the first loan and close it after the last one. A loan that nobody gives back
ends by itself. Neither side waits for the other (engine/runner/rank_export.py says why that is safe).
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable

import torch

from shoal.config import ResolvedConfig
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.runner.rank_export import WeightsExport, decode, encode
from shoal.errors import CheckpointError, UnavailableError
from shoal.version import __version__
from shoal.weights.fingerprint import tensors_fingerprint
from shoal.weights.loader import lies_by_shape
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)

EXPORT_S = 600.0  # A worker that takes longer to start has died.


class WeightExports:
    """`checkpoint()`: what the weights were read from, if it still lies on disk as it was read; else None.
    Every call is made between steps, and the loans end before the weights change or go."""

    def __init__(
        self, config: ResolvedConfig, ranks: Ranks, checkpoint: Callable[[], CheckpointFiles | None]
    ) -> None:
        self._config, self._ranks, self._checkpoint = config, ranks, checkpoint
        self._ends: dict[str, float] = {}  # when each loan ends
        self._offers: list[bytes] = []  # of each rank, while there are loans
        self._name: tuple[CheckpointFiles, bytes] | None = None  # of the weights, which is read from disk

    def export(self, name: bytes, reader: str) -> bytes:
        """A loan of the weights of this name (weights/fingerprint.py), in place of any other that this
        reader has. Raises UnavailableError where there is nothing to lend."""
        files = self._checkpoint()
        if files is None:
            raise UnavailableError(
                "the weights here are no checkpoint's as it lies on disk: nobody gets them"
            )
        if not lies_by_shape(files):
            raise UnavailableError(f"how the weights of {files.path} lie in memory depends on their numbers")
        if self._name is None or self._name[0] is not files:
            self._name = files, tensors_fingerprint(files)
        if self._name[1] != name:
            raise UnavailableError(f"the weights here are {files.path}'s, which are others")
        self.settle()
        if not self._ends:
            self._open()
        self._ends[reader] = time.monotonic() + EXPORT_S
        return encode(WeightsExport(layout_of(self._config), self._offers))

    def end(self, reader: str) -> None:
        """Does nothing if this reader has no loan."""
        if self._ends.pop(reader, None) is not None and not self._ends:
            self._close()

    def withdraw_all(self) -> None:
        """Who reads the weights now finds that out."""
        if self._ends:
            self._ends.clear()
            self._close()

    def settle(self) -> None:
        """Ends the loans of borrowers that have not come back."""
        for reader in [reader for reader, end in self._ends.items() if end < time.monotonic()]:
            self.end(reader)

    def _open(self) -> None:
        self._offers, errors = self._ranks.each(commands.EXPORT_WEIGHTS)
        if errors:
            self._close()
            raise UnavailableError(f"the weights cannot be lent: {errors[0]}")

    def _close(self) -> None:
        self._offers = []
        self._ranks.call(commands.END_WEIGHT_EXPORT)


def layout_of(config: ResolvedConfig) -> str:
    """Everything that decides how the ranks' weights lie in memory, beside the checkpoint itself."""
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
    """A loan's RankExports, if its weights lie in memory as those of an engine with this config will. [],
    with a line in the log: they do not, or it is no loan."""
    try:
        found = decode(data, WeightsExport)
        if found.layout != (ours := layout_of(config)):
            raise CheckpointError(f"there they are of {found.layout}, and here of {ours}")
        if not lies_by_shape(files):
            raise CheckpointError("how they lie in memory depends on their numbers")
        if len(found.ranks) != config.tensor_parallel_size:
            raise CheckpointError(f"there are {len(found.ranks)} ranks in it")
    except CheckpointError as error:
        logger.warning("another worker's weights are of no use here: %s; they are read from files", error)
        return []
    return found.ranks
