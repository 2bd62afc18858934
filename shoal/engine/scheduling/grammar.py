"""`Grammars`: compiles grammars in the background (llguidance) and computes a step's bitmasks of allowed
tokens. engine/grammar_admission.py keeps a sequence waiting until its grammar is ready;
engine/runner/whole_rows.py applies the masks.

A matcher knows a sequence's output tokens and nothing else of it, so it outlives preemption. A sequence under
a grammar is in lockstep: its next mask needs its last token. What a grammar is: text/grammar/structured.py.

Most masks are computed within a step, in much less time than the step takes. An unusual grammar may need much
longer, and a client of a server can send one. A sequence whose masks are slow gets them from one background
thread, and is left out of steps meanwhile, so that it delays no other request. If it stays slow, it ends with
an error.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import abc
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from shoal.engine.scheduling.part_state import GrammarRow
from shoal.errors import RequestError
from shoal.sampling_params import StructuredOutputsParams
from shoal.text.grammar.structured import LIMITS, grammar_of, in_any_spelling, in_deep_thread, short, texts_of
from shoal.text.tokenizer import Tokenizer, end_token_ids

logger = logging.getLogger(__name__)

AheadMask = tuple[np.ndarray, float]  # a mask, int32 [words], and the seconds of processor time it took

KEPT = 64  # compiled grammars that are kept for requests that bring the same
# A step's masks are slow if they take longer than SLOW_S together, and SLOW_ROW_S more for each of them.
SLOW_S = 0.01
SLOW_ROW_S = 0.0005
# The slow masks of one sequence may take MOST_SLOW_S together, and TOKEN_S more for each of its tokens.
MOST_SLOW_S = 2.0
TOKEN_S = 0.02
# Number of fast masks in a row after which a slow sequence returns to the steps; doubled each time the
# sequence becomes slow again.
FAST_AGAIN = 8
NICENESS = 10  # added to the thread that computes slow masks


class _Markers(NamedTuple):
    """Special tokens in a table. named: the texts of those in the grammar, by token; unnamed: bits, int32
    [words], of all others."""

    named: dict[int, bytes]
    unnamed: np.ndarray


class Grammar:
    """The state of one sequence in its grammar. `end_ids` are the tokens that end a text."""

    def __init__(
        self,
        matcher: LLMatcher,
        table: LLTokenizer,
        end_ids: frozenset[int],
        compute_ahead: Callable[[LLMatcher], Future[AheadMask]],
        markers: _Markers | None = None,
    ) -> None:
        """table: the matcher's. markers: the special tokens in it; None: it has none."""
        self.matcher, self.end_ids, self._table, self._markers = matcher, end_ids, table, markers
        self.ended = False
        self.dead_end = False  # the request's other options left no token that the grammar allows
        self.error: str | None = None
        self._compute_ahead = compute_ahead
        # the next token's mask, if it is computed in the background
        self._ahead: Future[AheadMask] | None = None
        self._wants_ahead = False
        self._is_slow = False
        self._slow_s = 0.0  # seconds of all slow masks
        self._num_tokens = 0
        self._num_fast = 0  # masks in a row that were fast
        self._fast_again = FAST_AGAIN

    @property
    def is_ready(self) -> bool:
        """True if a step may sample the next token now."""
        return not self._wants_ahead and (self._ahead is None or self._ahead.done())

    def note_slow(self, seconds: float) -> None:
        """Notes that a mask took `seconds` within a step. The next masks are computed in the background."""
        if not self._is_slow:
            self._is_slow, self._num_fast = True, 0
            self._fast_again *= 2
        self._slow_s += seconds

    def begin_ahead(self) -> None:
        """Begins to compute the next token's mask in the background. The matcher must not move meanwhile."""
        self._wants_ahead = False
        self._ahead = self._compute_ahead(self.matcher)

    def begin_slow(self) -> None:
        if self._wants_ahead:
            self.begin_ahead()

    def draft(self, looked_up: list[int], most: int) -> tuple[list[int], int]:
        if self._is_slow or self._ahead is not None or self.ended or self.matcher.is_error():
            return [], 0
        begin = time.perf_counter()
        found: list[int] = []
        num_forced = 0
        while len(found) < most:
            run = forced = self._table.tokenize_bytes(self.matcher.compute_ff_bytes())
            if not forced and looked_up[: len(found)] == found:
                run = looked_up[len(found) :]
            run = run[: most - len(found)]
            ends = [i for i, token_id in enumerate(run) if token_id in self.end_ids]
            count = self.matcher.try_consume_tokens(run[: ends[0]] if ends else run)
            found += run[:count]
            if forced and num_forced == len(found) - count:
                num_forced = len(found)
            if count == 0:
                break
        self.matcher.rollback(len(found))
        if (seconds := time.perf_counter() - begin) > SLOW_S:
            self.note_slow(seconds)
            return [], 0
        return found, num_forced

    def keep_markers(self, mask: np.ndarray, after: list[int]) -> None:
        """Takes special tokens that the grammar does not name out of a mask, unless no other token is left: a
        pattern may force the text of one. Where the text of one that it names must follow, no other token is
        left: a model that would rather say something else would spell it in small ones. after: the drafts
        before the mask's token."""
        if self._markers is None:
            return
        kept = mask & ~self._markers.unnamed
        if kept.any():
            mask[:] = kept
        for token_id, text in self._markers.named.items():
            if mask[token_id // 32] >> token_id % 32 & 1 and self._forced(after).startswith(text):
                mask[:] = _bits([token_id], len(mask))

    def _forced(self, after: list[int]) -> bytes:
        """Returns the only text with which the grammar can continue after these tokens, as far as it is
        known."""
        count = self.matcher.try_consume_tokens(after)
        forced = self.matcher.compute_ff_bytes()
        self.matcher.rollback(count)
        return forced

    def take_ahead(self) -> np.ndarray | None:
        """Returns the next token's mask, int32 [words], if it was computed in the background, otherwise
        None."""
        if self._ahead is None:
            return None
        mask, seconds = self._ahead.result()
        self._ahead = None
        if seconds > SLOW_S:
            self._num_fast = 0
            self._slow_s += seconds
        else:
            self._num_fast += 1
            self._is_slow = self._num_fast < self._fast_again
        return mask

    def close(self) -> None:
        """The sequence has ended: its next mask is not needed."""
        if self._ahead is not None:
            self._ahead.cancel()

    def accept(self, token_id: int) -> bool:
        """Applies a sampled token. Returns False if the sequence must end: `error` says why."""
        # A matcher that has failed while a mask was computed would take the end of text.
        if not self.matcher.is_error() and self.matcher.consume_token(token_id):
            self.ended = token_id in self.end_ids
            self._num_tokens += 1
            if self._is_slow and not self.ended:
                return self._goes_on()
            return True
        self.error = (
            "allowed_token_ids, bad_words or min_tokens leave no token that the grammar allows; drop one of "
            "them"
            if self.dead_end
            else f"the grammar cannot continue: {short(self.matcher.get_error())}; simplify it"
        )
        return False

    def _goes_on(self) -> bool:
        """Wants a slow sequence's next mask. Returns False and sets `error` if it was slow for too long."""
        if self._slow_s > MOST_SLOW_S + TOKEN_S * self._num_tokens:
            took_ms, most_ms = 1000 * self._slow_s / self._num_tokens, 1000 * TOKEN_S
            self.error = (
                f"the grammar is too slow: it took {took_ms:.0f} ms a token, and {most_ms:.0f} is "
                "the most that it may take for long; simplify it"
            )
            return False
        self._wants_ahead = True  # the step may bring more tokens
        return True


class Grammars:
    """All grammars of an engine. `load_tokenizer` is called by `prepare`, or else for the first grammar in
    the background.

    end_ids: the tokens that end a text, in addition to the tokenizer's own. closes_objects and is_dense: as
    in structured.grammar_of.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        end_ids: Iterable[int],
        closes_objects: bool = True,
        is_dense: bool = False,
    ) -> None:
        self._closes_objects, self._is_dense = closes_objects, is_dense
        self._load_tokenizer, self._vocab_size, self._end_ids = load_tokenizer, vocab_size, tuple(end_ids)
        self._num_words = -(-vocab_size // 32)
        self._executor: LLExecutor | None = None
        # One background thread that computes masks for the engine's thread and the compiler's threads.
        self._beside = ThreadPoolExecutor(
            1, thread_name_prefix="shoal-slow-masks", initializer=_let_steps_go_first
        )
        self._beside_executor: LLExecutor | None = None  # made and used in that thread only
        self.under_way: set[Future[AheadMask]] = set()  # masks that are being computed in the background
        self._compiled = functools.lru_cache(maxsize=KEPT)(self._compile)  # called in one thread only
        self._table = functools.cache(self._build_table)  # called in one thread only
        self._tokenizer: Tokenizer | None = None

    def prepare(self) -> None:
        """Loads the tokenizer and builds the table of its tokens. That holds Python's lock for a good part of
        a second, so a server does it before it has requests. A model for which it fails can serve all but
        grammars: each request for one gets the error."""
        if (error := in_deep_thread(lambda: self._table(False)).exception()) is not None:
            logger.warning("grammars cannot be used: %s", error)

    def start(
        self,
        params: StructuredOutputsParams,
        output_token_ids: abc.Sequence[int] = (),
        shows_special: bool = False,
    ) -> Future[Grammar]:
        """Compiles a grammar in the background, for a sequence that has these outputs already. The future
        raises RequestError for a grammar that is not usable or does not allow the outputs, and
        CheckpointError for a tokenizer that is not usable.

        shows_special: the answer's text has special tokens. A marker that the grammar names may be such a
        token then; otherwise it is spelled in others, as the token would not be shown.
        """
        return in_deep_thread(lambda: self._new(params, output_token_ids, shows_special))

    def masks(self, rows: list[GrammarRow]) -> np.ndarray:
        """The masks of a step, int32 [rows, words], with a bit for each allowed token.

        A token that the request's other options forbid is taken out. Where no token is left, the end of text
        may be sampled; if the grammar does not end there, `accept` refuses it.
        """
        words = self._num_words
        masks = np.zeros((len(rows), words), np.int32)
        grammars: list[Grammar] = [row.grammar for row in rows]  # type: ignore[misc]
        now: list[tuple[Grammar, int, list[int]]] = []
        for i, (grammar, row) in enumerate(zip(grammars, rows)):
            if row.after:
                now[-1] = (*now[-1][:2], row.after)
            elif (ahead := grammar.take_ahead()) is None:
                now.append((grammar, i, []))
            else:
                masks[i] = ahead
            grammar.dead_end = False
        if now:
            self._compute_now(now, masks)
        for row, mask, grammar in zip(rows, masks, grammars):
            matcher = grammar.matcher
            grammar.keep_markers(mask, row.after)
            if row.allowed is not None:
                mask &= _bits(row.allowed, words)
            if row.banned:
                mask &= ~_bits(row.banned, words)
            if matcher.is_error() or not mask.any():
                grammar.dead_end = not matcher.is_error()
                mask[:] = _bits(self._end_ids, words)
        return masks

    def _compute_now(self, wanted: list[tuple[Grammar, int, list[int]]], masks: np.ndarray) -> None:
        """Computes masks within the step, in many threads: of each of these grammars into the row of `masks`
        with this index, and after each of its drafts into the rows that follow."""
        if self._executor is None:
            self._executor = LLExecutor()
        begin = time.perf_counter()
        target = masks.ctypes.data, 4 * self._num_words, len(masks)
        if single := [(grammar.matcher, i) for grammar, i, drafts in wanted if not drafts]:
            self._executor.unsafe_compute_mask_ptr(single, *target)
        if several := [(grammar.matcher, i, drafts) for grammar, i, drafts in wanted if drafts]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(several, *target)
        seconds = time.perf_counter() - begin
        if seconds > SLOW_S + SLOW_ROW_S * (len(wanted) + sum(len(drafts) for _, _, drafts in wanted)):
            # The slow one shows when they are computed one by one, in the background.
            for grammar, _, _ in wanted:
                grammar.note_slow(seconds / len(wanted))

    def _compute_ahead(self, matcher: LLMatcher) -> Future[AheadMask]:
        future = self._beside.submit(self._compute_beside, matcher)
        self.under_way.add(future)
        future.add_done_callback(self.under_way.discard)
        return future

    def _compute_beside(self, matcher: LLMatcher) -> AheadMask:
        if self._beside_executor is None:
            self._beside_executor = LLExecutor(1)
        # The processor time: while steps need the processor, this thread waits.
        begin = time.thread_time()
        mask = np.zeros((1, self._num_words), np.int32)
        self._beside_executor.unsafe_compute_mask_ptr(
            [(matcher, 0)], mask.ctypes.data, 4 * self._num_words, 1
        )
        return mask[0], time.thread_time() - begin

    # In the background

    def _new(
        self, params: StructuredOutputsParams, output_token_ids: abc.Sequence[int], shows_special: bool
    ) -> Grammar:
        markers = self._markers(params) if shows_special else None
        grammar_text = grammar_of(params, self._closes_objects, self._is_dense, token_of=self._token_of)
        matcher, first_seconds = self._compiled(grammar_text, markers is not None)
        table = self._table(markers is not None)
        grammar = Grammar(matcher.deep_copy(), table, frozenset(self._end_ids), self._compute_ahead, markers)
        # Before a mask is begun: the matcher must not move while another thread computes a mask of it.
        if not all(grammar.accept(token_id) for token_id in output_token_ids):
            assert grammar.error is not None
            raise RequestError(grammar.error, field="allowed_token_ids" if grammar.dead_end else None)
        if first_seconds > SLOW_S:
            grammar.note_slow(first_seconds)
            grammar.begin_ahead()
        return grammar

    def _token_of(self, text: str) -> int | None:
        ids = self._loaded().encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] not in self._end_ids else None

    def _markers(self, params: StructuredOutputsParams) -> _Markers | None:
        """Returns the special tokens; None if the grammar names none."""
        tokenizer = self._loaded()
        special = {i for i in tokenizer.all_special_ids if i < self._vocab_size} - set(self._end_ids)
        texts = texts_of(params)
        named = {i: text.encode() for i in special if (text := tokenizer.token_text(i)) and text in texts}
        return _Markers(named, _bits(special - named.keys(), self._num_words)) if named else None

    def _loaded(self) -> Tokenizer:
        if self._tokenizer is None:
            tokenizer = self._load_tokenizer()
            self._end_ids = end_token_ids(self._end_ids, tokenizer, self._vocab_size)
            if not self._end_ids:
                raise RequestError(
                    "structured_outputs needs a model with an end-of-text token, and this one names none; "
                    "set eos_token_id in its generation_config.json",
                    field="structured_outputs",
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    def _build_table(self, shows_special: bool) -> LLTokenizer:
        """Returns the table of the model's tokens."""
        tokenizer = self._loaded()
        return token_table(tokenizer, self._vocab_size, self._end_ids, shows_special)

    def _compile(self, grammar: str, shows_special: bool) -> tuple[LLMatcher, float]:
        """A matcher at the grammar's beginning, and the seconds that its first mask took."""
        table, grammar = self._table(shows_special), in_any_spelling(grammar)
        matcher = LLMatcher(table, grammar, log_level=0, limits=LIMITS)
        first = matcher.deep_copy()
        begin = time.perf_counter()
        # The first mask is mostly the costliest. Computed here it delays no step, and shows a grammar that
        # is too complex.
        first.compute_bitmask()
        seconds = time.perf_counter() - begin
        for m in (matcher, first):
            if m.is_error():
                raise RequestError(
                    f"structured_outputs is not usable: {short(m.get_error())}; mend or simplify it",
                    field="structured_outputs",
                )
        return matcher, seconds


def token_table(
    tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int], shows_special: bool = False
) -> LLTokenizer:
    """The tokens as our detokenizer spells them, so that a grammar speaks of the very text that is shown.
    Special tokens match no text unless `shows_special`; the tokens that end a text never do."""
    return LLTokenizer(
        TokenizerWrapper(_Tokens(tokenizer, vocab_size, tuple(end_ids), shows_special)),
        eos_token=list(end_ids),
    )


class _Tokens:
    """A tokenizer for llguidance: fields that it reads, and a call that spells a text as the model would,
    without the tokens that match no text."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...], shows_special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        hidden = {*end_ids} if shows_special else {*tokenizer.all_special_ids, *end_ids}
        self.special_token_ids = sorted(i for i in hidden if i < vocab_size)
        self._hidden = frozenset(hidden)
        # An id beyond the tokenizer's end has no bytes and is never sampled.
        self.tokens = [tokenizer.token_bytes[i] for i in range(vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spelled(text if isinstance(text, str) else text.decode())

    def _spelled(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._hidden.isdisjoint(ids):
            return ids
        # A hidden token's text is encoded in two parts, so that ordinary tokens spell it.
        found: list[int] = []
        for token_id in ids:
            piece = self._tokenizer.token_text(token_id) if token_id in self._hidden else ""
            found += self._spelled(piece[:1]) + self._spelled(piece[1:]) if len(piece) > 1 else [token_id]
        return found


def _let_steps_go_first() -> None:
    """Gives the calling thread less of a busy processor than the threads that compute steps get."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _bits(token_ids: Iterable[int], words: int) -> np.ndarray:
    """A mask, int32 [words], that allows these tokens."""
    bits = np.zeros(words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
