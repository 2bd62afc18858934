"""`AnswerKeeper`: the part of an engine that collects its answers, in which drafts of later requests are
looked up. drafting/earlier_answers.py stores them and chooses among them."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.engine.drafting.earlier_answers import EarlierAnswers
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.engine.step_part import StepPart


class AnswerKeeper(StepPart):
    """Answers stay when weights change or the engine sleeps: they are guesses that every step verifies."""

    def __init__(self, answers: EarlierAnswers, scheduler: Scheduler) -> None:
        self._answers, self._scheduler = answers, scheduler
        self._ended: set[Sequence] = set()  # kept already, though a step in flight may have them

    def before_schedule(self) -> None:
        """Keeps the answers that were ended from outside since the last step: at a stop string, or as the
        client left."""
        self._ended |= self._keep(self._scheduler.finished_outside)

    def completed(self, plan: StepPlan, seconds: float) -> None:
        ended = (entry.seq for entry in plan.scheduled if entry.seq.status is SequenceStatus.FINISHED)
        self._ended = self._keep(ended)

    def start_anew(self) -> None:
        self._ended.clear()

    def _keep(self, ended: Iterable[Sequence]) -> set[Sequence]:
        """Keeps the answers of these sequences, and returns the sequences."""
        found = set(ended)
        for seq in found - self._ended:
            prompt, answer = seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids
            self._answers.add(seq.root, prompt, answer)
        return found
