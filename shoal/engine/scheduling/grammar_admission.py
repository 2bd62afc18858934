"""Sequences that wait for their grammar: held back from the scheduler until it is compiled."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from shoal.api import FinishReason
from shoal.engine.scheduling.grammar import Grammar, Grammars
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.sampling_params import StructuredOutputsParams

WAIT_S = 0.001  # how long an idle step waits for a grammar; another request may come meanwhile


class GrammarAdmission:
    """Compiles grammars in the background and lets each sequence go when its grammar is there."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler) -> None:
        self._grammars, self._scheduler = grammars, scheduler
        self._compiling: list[tuple[Sequence, Future[Grammar]]] = []

    def prepare(self) -> None:
        """Does what the first grammar needs. Otherwise the first sequence under one waits for it, and the
        steps beside it."""
        self._grammars.prepare()

    def hold(self, seq: Sequence, params: StructuredOutputsParams) -> None:
        """Begins to compile the grammar. The scheduler does not admit the sequence before `let_go`."""
        seq.held = True
        self._compiling.append((seq, self._grammars.start(params, seq.output_token_ids)))

    def let_go(self) -> None:
        """Lets the sequences go whose grammar is ready, and ends those whose grammar failed."""
        for entry in [entry for entry in self._compiling if _is_settled(*entry)]:
            self._compiling.remove(entry)
            seq, future = entry
            if seq.status is SequenceStatus.FINISHED:
                future.cancel()
            elif (error := future.exception()) is not None:
                message = str(error) or repr(error)
                self._scheduler.finish(seq.request.request_id, FinishReason.ERROR, "grammar", message)
            else:
                seq.grammar, seq.held = future.result(), False

    @property
    def is_busy(self) -> bool:
        """Whether a grammar is being compiled, or a mask computed, beside the steps."""
        return bool(self._compiling or self._grammars.under_way)

    def wait(self) -> None:
        """Waits a moment for any of that to end."""
        futures: list[Future[Any]] = [future for _, future in self._compiling]
        wait(futures + list(self._grammars.under_way), WAIT_S, FIRST_COMPLETED)


def _is_settled(seq: Sequence, future: Future[Grammar]) -> bool:
    return future.done() or seq.status is SequenceStatus.FINISHED
