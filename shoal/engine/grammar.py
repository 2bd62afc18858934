"""Grammars at work: compiled in the background for the model's tokens, and a mask of what may follow for each row of a step.

A matcher depends on a sequence's output tokens alone, so it outlives preemption. A row under a grammar is in lockstep: its mask needs its
last token. What a grammar is: structured.py; how masks reach the logits: engine/sampling.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from shoal.api import StructuredOutputsParams
from shoal.engine.batch import GrammarRow
from shoal.errors import RequestError
from shoal.structured import LIMITS, grammar_of, in_deep_thread, short
from shoal.tokenizer import Tokenizer, end_token_ids

KEPT = 64    # compiled grammars, for requests that bring the same


class Grammar:
    """One sequence's way through its grammar."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int]) -> None:
        self.matcher, self.end_ids = matcher, end_ids
        self.ended = False
        self.dead_end = False    # the request's other wishes left no token
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Takes the drawn token. False if it does not fit: `error` says why, and the sequence must end."""
        if self.matcher.consume_token(token_id):
            self.ended = token_id in self.end_ids
            return True
        self.error = ("allowed_token_ids, bad_words or min_tokens leave no token that the grammar allows; drop one of them" if self.dead_end
                      else f"the grammar cannot go on: {short(self.matcher.get_error())}; simplify it")
        return False


class Grammars:
    """Nothing is loaded before the first grammar. `load_tokenizer` is called in the background then.

    end_ids: what ends a text, beside the tokenizer's own. closes_objects: as in structured.grammar_of.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, end_ids: Iterable[int],
                 closes_objects: bool = True) -> None:
        self._closes_objects = closes_objects
        self._load_tokenizer, self._vocab_size, self._end_ids = load_tokenizer, vocab_size, tuple(end_ids)
        self._executor: LLExecutor | None = None
        self._compiled = functools.lru_cache(maxsize=KEPT)(self._compile)    # called in one thread only
        self._tokenizer: LLTokenizer | None = None

    def start(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Compiles, in the background. The future raises RequestError or CheckpointError."""
        return in_deep_thread(lambda: self._new(params))

    def masks(self, rows: list[GrammarRow]) -> np.ndarray:
        """int32 [rows, words]: the bit of each token that may be drawn. What a row must not draw otherwise is taken out. Where nothing
        is left, the end of text is: if the grammar does not end there, `accept` refuses it."""
        words = -(-self._vocab_size // 32)
        masks = np.zeros((len(rows), words), np.int32)
        if self._executor is None:
            self._executor = LLExecutor()
        matchers = [row.grammar.matcher for row in rows]    # type: ignore[attr-defined]
        self._executor.unsafe_compute_mask_ptr([(m, i) for i, m in enumerate(matchers)], masks.ctypes.data, 4 * words, len(rows))
        for row, mask, matcher in zip(rows, masks, matchers):
            if row.allowed is not None:
                mask &= _bits(row.allowed, words)
            if row.banned:
                mask &= ~_bits(row.banned, words)
            if matcher.is_error() or not mask.any():
                row.grammar.dead_end = not matcher.is_error()    # type: ignore[attr-defined]
                mask[:] = _bits(self._end_ids, words)
        return masks

    # In the background

    def _new(self, params: StructuredOutputsParams) -> Grammar:
        return Grammar(self._compiled(grammar_of(params, self._closes_objects)).deep_copy(),
                       frozenset(self._end_ids))

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            tokenizer = self._load_tokenizer()
            self._end_ids = end_token_ids(self._end_ids, tokenizer, self._vocab_size)
            if not self._end_ids:
                raise RequestError("structured_outputs needs a model with an end-of-text token, and this one names none; "
                                   "set eos_token_id in its generation_config.json")
            self._tokenizer = token_table(tokenizer, self._vocab_size, self._end_ids)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        first = matcher.deep_copy()
        first.compute_bitmask()    # the costliest: here it stalls nobody, and what is too complex shows itself
        for m in (matcher, first):
            if m.is_error():
                raise RequestError(f"structured_outputs is not usable: {short(m.get_error())}; mend or simplify it")
        return matcher


def token_table(tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """The tokens as our detokenizer spells them: a grammar speaks of the very text that is shown. Hidden tokens match no text."""
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, vocab_size, tuple(end_ids))), eos_token=list(end_ids))


class _Tokens:
    """What llguidance reads of a tokenizer, and calls to spell forced text as the model would."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        hidden = {*tokenizer.all_special_ids, *end_ids}
        self.special_token_ids = sorted(i for i in hidden if i < vocab_size)
        self.tokens = [tokenizer.token_bytes[i] for i in range(vocab_size)]    # empty beyond the tokenizer's end: never drawn

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


def _bits(token_ids: Iterable[int], words: int) -> np.ndarray:
    bits = np.zeros(words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
