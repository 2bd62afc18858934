"""Timelines of requests: spans, and arrival times of tokens. They have no text of the request.

A timeline is kept in the process that answers the client. Other processes send their part with the outputs,
as spans whose times are durations (api.py).
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from shoal.api import FinishReason, Output, Request, Span
from shoal.sampling_params import SamplingParams

MAX_KEPT = 256  # requests
MAX_BATCHES = 4096  # batches of tokens per request whose arrivals are kept: the first ones
MAX_SPANS = 256  # spans per request that are kept: the first ones


class RequestSummary(msgspec.Struct, kw_only=True):
    """Summary of a request in `GET /requests`. None: unknown so far, or not applicable."""

    id: str
    model: str
    endpoint: str
    status: str  # "running", "finished", "failed"
    finish_reason: str | None
    started_at: float  # seconds since 1970
    seconds: float  # so far, or in total
    ttft_s: float | None
    itl_s: float | None  # the mean gap between two tokens
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    verified_drafts: int  # tokens that steps computed in advance
    accepted_drafts: int  # tokens of the answers that were such drafts
    workers: list[str]  # workers of a fleet that computed a part of it


class SpanView(msgspec.Struct):
    name: str
    worker: str  # "": the process that answers the client, or its one engine
    start_s: float  # since the request's start
    seconds: float
    attributes: dict[str, str | int | float]


class RequestDetails(RequestSummary, kw_only=True):
    """Summary and timeline. `tokens` are batches as they arrived: seconds since the request's start, and the
    number of tokens."""

    spans: list[SpanView]
    tokens: list[tuple[float, int]]


class AnswerTimeline:
    """One answer's part of a timeline. Times are by time.perf_counter."""

    __slots__ = ("_line", "_request", "_worker", "first", "has_ended", "last")

    def __init__(self, line: Timeline, request: Request | None) -> None:
        self._line, self._request, self._worker = line, request, ""
        self.first = self.last = 0.0  # arrival of a token; 0: no token yet
        self.has_ended = False

    @property
    def worker(self) -> str:
        """The worker of a fleet that generated the first token, or that has the request until then."""
        return self._worker if self._request is None else self._request.worker

    def push(self, output: Output, now: float) -> None:
        if output.spans is not None:
            self._line.add(output.spans, now)
        if output.token_ids:
            self.tokens(len(output.token_ids), now)
        if output.finish_reason is not None:
            self._line.reasons.add(output.finish_reason)
            self.has_ended = True

    def tokens(self, count: int, now: float, worker: str | None = None) -> None:
        """Counts tokens. worker: their source, if there is no Request with it."""
        if not self.first:
            self.first = now
            self._worker = worker if worker is not None else self.worker
        self.last = now
        self._line.tokens(count, now)

    def end(self) -> None:
        """Drops the reference to the request, whose prompt may be long."""
        self._worker, self._request, self.has_ended = self.worker, None, True


class Timeline:
    """The timeline of one request. The endpoint that answers it writes `prompt_tokens`, `cached_tokens` and
    `reasons`. Times are by time.perf_counter."""

    __slots__ = (
        "_batch_sizes",
        "_batch_times",
        "answers",
        "began",
        "cached_tokens",
        "drafted",
        "ended",
        "endpoint",
        "first",
        "has_failed",
        "id",
        "last",
        "model",
        "output_tokens",
        "params",
        "prompt_tokens",
        "reasons",
        "spans",
        "started_at",
        "trace_headers",
    )

    def __init__(self, request_id: str, model: str, endpoint: str, began: float) -> None:
        self.id, self.model, self.endpoint, self.began = request_id, model, endpoint, began
        self.started_at = time.time() - (time.perf_counter() - began)
        self.first = self.last = self.ended = 0.0
        self.has_failed = False
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.drafted = (0, 0)  # verified drafts, and those that became tokens of the answers
        self.reasons: set[str] = set()  # finish reasons of the answers, also of external workers
        self.answers: list[AnswerTimeline] = []
        self.spans: list[SpanView] = []
        self.params: SamplingParams | None = None  # None once its trace has ended
        self.trace_headers: dict[str, str] | None = None  # the W3C trace context for spans below this request
        self._batch_times, self._batch_sizes = array("d"), array("I")

    def answer(self, request: Request | None = None) -> AnswerTimeline:
        """Adds an answer."""
        line = AnswerTimeline(self, request)
        self.answers.append(line)
        return line

    def add(self, spans: Iterable[Span], now: float) -> None:
        """Adds spans. now: arrival of the output that reported them."""
        for span in spans:
            if len(self.spans) < MAX_SPANS:
                start_s = now - span.ago_s - self.began
                self.spans.append(SpanView(span.name, span.worker, start_s, span.seconds, span.attributes))

    def tokens(self, count: int, now: float) -> None:
        if not self.output_tokens:
            self.first = now
        self.last = now
        self.output_tokens += count
        if len(self._batch_times) < MAX_BATCHES:
            self._batch_times.append(now - self.began)
            self._batch_sizes.append(count)

    def end(self, *, has_failed: bool) -> None:
        """Ends the request. Further calls have no effect."""
        if not self.ended:
            self.ended, self.has_failed = time.perf_counter(), has_failed
            for answer in self.answers:
                answer.end()

    @property
    def finish_reason(self) -> str | None:
        return ",".join(sorted(self.reasons)) or None

    @property
    def is_broken_off(self) -> bool:
        return self.has_failed or FinishReason.ABORT in self.reasons

    @property
    def seconds(self) -> float:
        return (self.ended or time.perf_counter()) - self.began

    def all_spans(self) -> list[SpanView]:
        """Returns all spans by start, with the derived ones for decode and waiting."""
        decodes = [span for answer in self.answers for span in self._decodes(answer)]
        return sorted([*self.spans, *decodes, *self._waiting()], key=lambda span: span.start_s)

    def _waiting(self) -> list[SpanView]:
        """Returns the time since the last span, while or if no answer has begun. The engine and a fleet
        report their spans with the first output."""
        has_come = self.output_tokens > 0 or any(span.name == "prefill" for span in self.spans)
        if has_come or not self.answers or (self.ended and not self.is_broken_off):
            return []
        start_s, worker = max(
            ((one.start_s + one.seconds, one.worker) for one in self.spans), default=(0.0, "")
        )
        worker = self.answers[0].worker or worker
        return [SpanView("waiting", worker, start_s, max(0.0, self.seconds - start_s), {})]

    def _decodes(self, answer: AnswerTimeline) -> Iterator[SpanView]:
        """Yields spans from the answer's first token to its last, without the time of a migration."""
        if not answer.first:
            return
        start_s, worker = answer.first - self.began, answer.worker
        if len(self.answers) == 1:  # with several answers, the one that moved is unknown
            for move in self.spans:
                if move.name == "migration" and move.start_s >= start_s:
                    yield SpanView("decode", worker, start_s, move.start_s - start_s, {})
                    start_s, worker = move.start_s + move.seconds, move.worker
        end = answer.last if answer.has_ended else time.perf_counter()
        yield SpanView("decode", worker, start_s, max(0.0, end - self.began - start_s), {})

    def summary(self) -> RequestSummary:
        return RequestSummary(**self._figures())

    def details(self) -> RequestDetails:
        spans = [
            SpanView(span.name, span.worker, _rounded(span.start_s), _rounded(span.seconds), span.attributes)
            for span in self.all_spans()
        ]
        tokens = list(zip(map(_rounded, self._batch_times), self._batch_sizes))
        return RequestDetails(**self._figures(), spans=spans, tokens=tokens)

    def _figures(self) -> dict[str, Any]:
        later = self.output_tokens - sum(1 for answer in self.answers if answer.first)
        gaps = sum(answer.last - answer.first for answer in self.answers)
        workers = [span.worker for span in sorted(self.spans, key=lambda span: span.start_s)]
        status = "running" if not self.ended else "failed" if self.has_failed else "finished"
        return {
            "id": self.id,
            "model": self.model,
            "endpoint": self.endpoint,
            "status": status,
            "finish_reason": self.finish_reason,
            "started_at": self.started_at,
            "seconds": _rounded(self.seconds),
            "ttft_s": _rounded(self.first - self.began) if self.output_tokens else None,
            "itl_s": _rounded(gaps / later) if later > 0 else None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "verified_drafts": self.drafted[0],
            "accepted_drafts": self.drafted[1],
            "workers": [
                worker
                for worker in dict.fromkeys([*workers, *[answer.worker for answer in self.answers]])
                if worker
            ],
        }


class Timelines:
    """The last MAX_KEPT requests of one port, running or ended."""

    def __init__(self) -> None:
        self._lines: deque[Timeline] = deque(maxlen=MAX_KEPT)

    def add(self, line: Timeline) -> None:
        self._lines.append(line)

    def newest_first(self) -> Sequence[Timeline]:
        return list(reversed(self._lines))

    def find(self, request_id: str) -> Timeline | None:
        """Returns the newest timeline with this id: clients may use one twice."""
        return next((line for line in reversed(self._lines) if line.id == request_id), None)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
