"""`GrammarAdmission`: the part of an engine that has grammars compiled, keeps a sequence waiting until its
grammar and mask are ready, gives steps their masks, and has grammars cut drafts. scheduling/grammar.py
computes all of these."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from shoal.api import FinishReason
from shoal.engine.runner.sampler_options import SamplerOptions
from shoal.engine.scheduling.grammar import Grammar, Grammars
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.engine.step_part import StepPart

WAIT_S = 0.001  # how long an idle step waits for a grammar; another request may arrive meanwhile


class GrammarAdmission(StepPart):
    def __init__(self, grammars: Grammars, scheduler: Scheduler, most_drafts: int = 0) -> None:
        """`most_drafts`: drafts of a sequence in a step."""
        self._grammars, self._scheduler, self._most_drafts = grammars, scheduler, most_drafts
        self._compiling: dict[Sequence, Future[Grammar]] = {}
        self._compiled: list[Sequence] = []  # sequences with a grammar, until they have finished

    def prepare(self) -> None:
        """Loads what the first grammar needs. Otherwise the first request with a grammar would delay its
        steps."""
        self._grammars.prepare()

    def added(self, seq: Sequence) -> None:
        params = seq.request.params
        if params.structured_outputs is not None:
            self._compiling[seq] = self._grammars.start(
                params.structured_outputs, seq.output_token_ids, not params.skip_special_tokens
            )

    def may_start(self, seq: Sequence) -> bool:
        return seq not in self._compiling and (seq.grammar is None or seq.grammar.is_ready)

    def before_schedule(self) -> None:
        """Releases the sequences whose grammar is ready, and ends the sequences whose grammar failed."""
        for seq, future in list(self._compiling.items()):
            if seq.status is SequenceStatus.FINISHED:
                future.cancel()
            elif not future.done():
                continue
            elif (error := future.exception()) is not None:
                message = str(error) or repr(error)
                self._scheduler.finish(seq.request.request_id, FinishReason.ERROR, "grammar", message)
            else:
                seq.grammar = future.result()
                self._compiled.append(seq)
            del self._compiling[seq]
        if self._compiled:
            self._compiled = [seq for seq in self._compiled if seq.status is not SequenceStatus.FINISHED]
            for seq in self._compiled:
                self._prepare_next(seq)

    def _prepare_next(self, seq: Sequence) -> None:
        """Prepares the next step of a sequence: its mask if that is slow, and its drafts."""
        if seq.grammar is None or seq.num_pending:
            return
        seq.grammar.begin_slow()
        history = seq.drafts
        if self._most_drafts and history is not None and not history.is_cut:
            history.drafts, history.num_forced = seq.grammar.draft(history.drafts, self._most_drafts)
            seq.most_drafts = history.num_drafts = len(history.drafts)
            history.is_cut, history.gains = True, []

    def before_launch(self, options: SamplerOptions) -> None:
        if options.grammars:
            options.masks = self._grammars.masks(options.grammars)

    def after_step(self, waits: bool) -> None:
        if waits and self.is_busy:
            self.wait()

    @property
    def is_busy(self) -> bool:
        """True if a grammar or a mask is being computed in the background."""
        return bool(self._compiling or self._grammars.under_way)

    def wait(self) -> None:
        """Waits up to WAIT_S for any of these to end."""
        futures: list[Future[Any]] = [*self._compiling.values(), *self._grammars.under_way]
        wait(futures, WAIT_S, FIRST_COMPLETED)
