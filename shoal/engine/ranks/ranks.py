"""`Ranks`: the ranks of one engine as one object: rank 0's ModelRunner in this process, and the others.
workers.py runs the others' processes, and engine/runner/commands.py has the commands.

Every rank runs the same commands in the same order. Rank 0 does its own part while the others do theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch

from shoal.config import ResolvedConfig, SpeculativeConfig
from shoal.engine.ranks import peer_copies
from shoal.engine.ranks.peer_sums import CudaPeerSums, connect
from shoal.engine.ranks.rendezvous import Rendezvous, join
from shoal.engine.ranks.workers import Pending, WorkerProcesses
from shoal.engine.runner import commands
from shoal.engine.runner.commands import Command
from shoal.engine.runner.runner import ModelRunner, StepResult
from shoal.engine.runner.sampler_options import SamplerOptions
from shoal.errors import ConfigError, EngineDeadError, ShoalError, UnavailableError, UserError
from shoal.layers.parallel import TensorParallel
from shoal.weights.source import CheckpointFiles, resolve

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

NEWS_WAIT_S = 1.0  # after a failure that the death of a rank may have caused, for the news of that death


class Ranks:
    """Starts the ranks and loads their weights; raises ConfigError or CheckpointError if that is impossible.
    To be used by one thread.

    `error` says why the ranks can no longer be used, once that is so; every command then raises it.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        files: CheckpointFiles,
        predecessor: Ranks | None = None,
        exports: Sequence[bytes] = (),
    ) -> None:
        """`predecessor`: ranks in this process that rest, and will be closed when these are ready. `exports`:
        of another worker's weights, one for each rank (engine/runner/rank_export.py)."""
        self.size = config.tensor_parallel_size
        self.error: EngineDeadError | None = None
        self._waits = False  # whether this rank waits for the device, where the others compute too
        # The threads that this process had before any rank was in it. close() sets this number again.
        self._num_threads: int = torch.get_num_threads() if predecessor is None else predecessor._num_threads
        self._divides_threads = config.device == "cpu" and self.size > 1
        self._group: WorkerProcesses | None = None
        self._tp: TensorParallel | None = None
        self._runner: ModelRunner | None = None
        self._sums: CudaPeerSums | None = None
        try:
            self._start(config, files, exports)
        except torch.OutOfMemoryError:
            self.close()
            if predecessor is not None:
                raise  # memory may be freed later, and the old model is still there
            raise ConfigError(
                f"{config.model} does not fit into the memory that is free of the GPU; end what else "
                "runs there, raise tensor_parallel_size, or take a smaller or quantized model"
            ) from None
        except BaseException:
            self.close()
            raise

    def _start(self, config: ResolvedConfig, files: CheckpointFiles, exports: Sequence[bytes]) -> None:
        if config.device == "cuda":
            use_gpu(0)
        self.use_threads()
        self._tp = tp = TensorParallel.single()
        if self.size > 1:
            rendezvous = Rendezvous()
            init = {"config": dataclasses.asdict(config), "port": rendezvous.port, "exports": list(exports)}
            self._group = WorkerProcesses(self.size, "shoal.engine.ranks.ranks:serve_rank", init)
            self._tp = tp = rendezvous.connect(0, self.size, config.device, self._group.check)
            self._group.when_failed(tp.abort)  # so that no rank waits on the device for a dead one
            self._group.watch_waits(lambda: tp.waits or self._waits)
        self._sums = connect_sums(config, files, tp)
        self._runner = ModelRunner(config, files, tp, exports[0] if exports else None)

    @property
    def runner(self) -> ModelRunner:
        """Rank 0's own. Raises EngineDeadError after close()."""
        if self._runner is None:
            assert self.error is not None
            raise self.error
        return self._runner

    # Commands

    def call(self, command: Command[Result, *Arguments], *args: *Arguments) -> list[Result]:
        """Runs the command on every rank. Returns the results in rank order; raises the first error."""
        with self._watched():
            pending = self.ask_others(command, *args)
            own = command.run(self.runner, *args)
            return [own] if pending is None else [own, *pending.results()]

    def each(
        self, command: Command[Result, *Arguments], *args: *Arguments
    ) -> tuple[list[Result], list[Exception]]:
        """Runs a command that may fail on every rank. Returns the results of the ranks where it succeeded and
        the errors of the others, both in rank order. Raises EngineDeadError if a rank is dead."""
        return self.each_with(lambda: command.run(self.runner, *args), command, *args)

    def each_with(
        self, own: Callable[[], Result], command: Command[Result, *Arguments], *args: *Arguments
    ) -> tuple[list[Result], list[Exception]]:
        """Runs a command that may fail on ranks 1 and up, while rank 0 calls `own`. Returns and raises what
        `each` does."""
        outcomes: list[Result | Exception] = []
        with self._watched():
            pending = self.ask_others(command, *args)
            try:
                outcomes.append(own())
            except (ShoalError, RuntimeError, MemoryError, OSError) as error:
                outcomes.append(error)
            if pending is not None:
                outcomes += pending.outcomes()
        results = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        return results, [outcome for outcome in outcomes if isinstance(outcome, Exception)]

    def send(self, command: Command[Any, *Arguments], *args: *Arguments) -> None:
        """Runs the command on every rank without waiting for the others. A rank in which it raises dies of
        it."""
        self.check_usable()
        with self._watched():
            if self._group is not None:
                self._group.send(command.name, *args)
            command.run(self.runner, *args)

    def ask_others(self, command: Command[Result, *Arguments], *args: *Arguments) -> Pending[Result] | None:
        """Begins the command on the other ranks; their answers can be collected later. None if rank 0 is the
        only one."""
        self.check_usable()
        return None if self._group is None else self._group.submit(command.name, *args)

    # Steps

    def step(self, packed: np.ndarray, options: SamplerOptions | None) -> StepResult:
        """Launches a packed step on every rank. Returns rank 0's result, whose tokens may not be there
        yet."""
        if self._group is not None:
            self._group.send(commands.STEP.name, packed)
        return self.runner.step(packed, options)

    def wait(self, result: StepResult) -> list[list[int]]:
        """The step's tokens, a list for each sample. Raises EngineDeadError if a rank dies meanwhile."""
        if self._group is None:
            return result.wait()
        self._waits = True
        try:
            return result.wait(self._group.check)
        finally:
            self._waits = False

    # Life and death

    def check_usable(self) -> None:
        """Raises `error` if there is one."""
        if self.error is not None:
            raise self.error

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around a command to all ranks: `error` says at once if the ranks cannot be used after it."""
        try:
            yield
        except (UserError, UnavailableError):  # A rank refused what it was asked, and all live.
            raise
        except Exception as error:
            cause = self._cause(error)
            if isinstance(cause, EngineDeadError):
                self.error = cause
            if cause is error:
                raise
            raise cause from error
        except BaseException:  # An interrupt: other ranks may have done their part when rank 0 has not.
            if self._group is not None:
                self.error = EngineDeadError(
                    "interrupted in the middle of a command to several ranks; build a new engine"
                )
            raise

    def failed(self, error: Exception) -> EngineDeadError:
        """Takes note that `error` ended the engine, and returns what is to be raised: the death of a rank, if
        there was one, rather than the broken collective that it left behind."""
        cause = self._cause(error)
        if not isinstance(cause, EngineDeadError):
            # A KeyError's text alone, or an AssertionError's, which may be empty, says little.
            says = str(cause) if isinstance(cause, (RuntimeError, ShoalError)) else repr(cause)
            cause = EngineDeadError(f"a step failed: {says}")
        self.error = cause
        return cause

    def _cause(self, error: Exception) -> Exception:
        """Returns the reason why a rank ended, if one has: its end may have caused `error`. Otherwise `error`
        itself."""
        try:
            if self._group is not None:
                self._group.check(wait_s=NEWS_WAIT_S)
        except ShoalError as death:
            return death
        return error

    def use_threads(self) -> None:
        """On the CPU the ranks share the processor's threads. To be called again when other ranks in this
        process have ended."""
        if self._divides_threads:
            torch.set_num_threads(max(1, self._num_threads // self.size))

    def close(self) -> None:
        """Ends the other ranks and frees the device, all of it even if a part of that fails. Safe to call
        twice."""
        runner, group, tp = self._runner, self._group, self._tp
        self._runner = self._group = self._tp = None
        sums, self._sums = self._sums, None
        self.error = self.error or EngineDeadError("the engine was ended; build a new one")
        with ExitStack() as ends:  # It runs the last entry first.
            ends.callback(torch.set_num_threads, self._num_threads)
            if sums is not None:
                ends.callback(sums.close)
            if tp is not None:
                ends.callback(tp.close)
            if group is not None:
                ends.callback(group.close)
            if runner is not None:
                ends.callback(runner.exit)
            if group is not None and group.failed and tp is not None:
                # A collective may be running whose other half is gone. Otherwise the steps in flight end by
                # themselves.
                ends.callback(tp.close)
            if runner is not None:
                ends.callback(runner.drop_graphs)  # NCCL does not end while graphs hold its collectives.


def serve_rank(
    rank: int, world_size: int, config: dict[str, Any], port: int, exports: Sequence[bytes]
) -> dict[str, Callable[..., Any]]:
    """Returns the table of commands that a rank other than 0 serves (engine/ranks/worker_main.py), on a
    ModelRunner like rank 0's."""
    resolved = ResolvedConfig(**config | {"speculative": SpeculativeConfig.of(config["speculative"])})
    if resolved.device == "cuda":
        use_gpu(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    tp = join(rank, world_size, resolved.device, port)
    files = resolve(
        resolved.model, resolved.revision, resolved.download_dir, overrides=resolved.hf_overrides
    ).overridden(resolved.hf_overrides)
    files = files.with_head(resolved.speculative, resolved.download_dir)
    connect_sums(resolved, files, tp)
    return commands.bound_to(ModelRunner(resolved, files, tp, exports[rank] if exports else None))


def connect_sums(config: ResolvedConfig, files: CheckpointFiles, tp: TensorParallel) -> CudaPeerSums | None:
    """Gives `tp` Shoal's own sums over GPUs, small and large, as far as they work here and the model's
    layers use them, and returns them. All ranks call this together."""
    if not config.peer_all_reduce or tp.size == 1 or config.device != "cuda":
        return None
    size, dtype = files.config.hidden_size, getattr(torch, config.dtype)
    tp.sums = sums = connect(tp, size, dtype)
    if sums is not None and peer_copies.takes_model(files.config, tp.size):
        tp.large_sums = sums.large = peer_copies.connect(tp, size, dtype)
    return sums


def use_gpu(rank: int) -> None:
    """Makes the rank's GPU the one that its process uses."""
    torch.cuda.set_device(rank)
    torch.cuda.init()
