"""Builds `Request`s from prompts and sampling parameters, and checks them for a model. `LLM` and the server
use it; answer.py turns outputs into text.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np

from shoal.api import Request
from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams
from shoal.text.tokenizer import Tokenizer


class RequestBuilder:
    """Builds the requests for one model.

    tokenizer: None if the engine runs without one. seed: the source of seeds for requests without one.
    closes_objects: objects of a JSON schema have only the keys that it names, unless it or the request says
    otherwise.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        seed: int = 0,
        closes_objects: bool = True,
    ) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self.closes_objects = closes_objects
        self._seeds = random.Random(seed)

    def check_grammar(self, params: SamplingParams) -> None:
        """Raises RequestError for unusable structured outputs. Takes up to half a second."""
        if params.structured_outputs is not None:
            # imported here, as the grammar library takes long to import and most requests do not need it
            from shoal.text.grammar import structured

            structured.check(params.structured_outputs, self.closes_objects)

    def build(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_ids: Iterator[str],
        *,
        arrival: float,
        max_tokens: Sequence[int] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        embed: bool = False,
        session: str | None = None,
        tags: tuple[str, ...] = (),
        output_token_ids: Sequence[int] = (),
        external_id: str = "",
        trace_headers: dict[str, str] | None = None,
    ) -> list[Request]:
        """Returns `params.n` requests for each prompt (a list of token ids), prompt by prompt. Answer i of a
        prompt is sampled with seed + i.

        request_ids: an id for each request, in that order. max_tokens: for each prompt's answers, in place of
        `params.max_tokens`. output_token_ids: the first tokens of each answer, sampled elsewhere; the engine
        continues after them. external_id, trace_headers: see Request. Raises RequestError for stop strings
        and bad words without a tokenizer.
        """
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise RequestError(
                "stop strings and bad_words need a tokenizer; this engine runs without one "
                "(skip_tokenizer_init)",
                field="stop",
            )
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self.tokenizer is not None:
            bad_words = self.tokenizer.bad_word_ids(params.bad_words, self.vocab_size)
        found = []
        for number, prompt in enumerate(prompts):
            seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
            for i in range(params.n):
                own = copy_params(params)
                own.n, own.seed = 1, (seed + i) % 2**64
                if max_tokens is not None:
                    own.max_tokens = max_tokens[number]
                    own.min_tokens = min(params.min_tokens, own.max_tokens)
                request = Request(
                    next(request_ids),
                    prompt,
                    own,
                    priority=priority,
                    arrival=arrival,
                    cache_salt=cache_salt,
                    embed=embed,
                    session=session,
                    tags=tags,
                    eos_token_ids=self.eos_token_ids,
                    bad_word_ids=bad_words,
                    external_id=external_id,
                    trace_headers=trace_headers,
                )
                if output_token_ids:
                    request.output_token_ids = list(output_token_ids)
                found.append(request)
        return found


def copy_params(params: SamplingParams) -> SamplingParams:
    """Returns a copy without the checks of `replace`. (`copy` with slots takes more than twice as long, and
    each request has its own copy.)"""
    if type(params) is not SamplingParams:
        return copy(params)
    own = object.__new__(SamplingParams)
    for name in SamplingParams.__slots__:
        setattr(own, name, getattr(params, name))
    return own


def check_request(request: Request, vocab_size: int, max_logprobs: int) -> None:
    """Raises RequestError for a request that is impossible for a model with this vocabulary. An engine checks
    each request once, on arrival. max_logprobs: the most log-probabilities per token; -1: any number."""
    params, ids = request.params, request.prompt_token_ids
    if not ids:
        raise RequestError("prompt is empty (0 tokens); give at least one token", field="prompt")
    _check_token_ids("prompt", ids, vocab_size)
    if request.output_token_ids:
        _check_output(request, vocab_size)
    if request.embed and (request.offers_kv or request.kv_ticket is not None):
        raise RequestError(
            "an embedding neither offers nor reads KV blocks; leave out offers_kv and kv_ticket"
        )
    if request.fetches_only and (request.kv_ticket is None or request.embed or request.output_token_ids):
        raise RequestError(
            "fetches_only reads the KV blocks of a prompt: give the kv_ticket, and leave embed and "
            "output_token_ids out",
            field="fetches_only",
        )
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name} must have token ids in [0, {vocab_size}), the vocabulary, got {token_id}; drop "
                    "it",
                    field=name,
                )
    if params.allowed_token_ids is not None:
        banned = {word[0] for word in request.bad_word_ids if len(word) == 1}
        if params.min_tokens > len(request.output_token_ids):
            banned |= request.stop_ids
        if banned.issuperset(params.allowed_token_ids):
            raise RequestError(
                f"bad_words or min_tokens forbid all of allowed_token_ids {params.allowed_token_ids!r:.80}; "
                "allow another id, or drop one of them",
                field="bad_words",
            )
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and max_logprobs >= 0 and (vocab_size if asked < 0 else asked) > max_logprobs:
            count = f"{asked} (all)" if asked < 0 else asked
            raise RequestError(
                f"{name} must be <= max_logprobs {max_logprobs}, got {count}; ask for fewer or raise "
                "max_logprobs of the engine",
                field=name,
            )


def _check_output(request: Request, vocab_size: int) -> None:
    """Raises RequestError if output_token_ids leave no token to generate."""
    _check_token_ids("output_token_ids", request.output_token_ids, vocab_size)
    if request.embed:
        raise RequestError(
            "output_token_ids belong to an answer, and an embedding has none; leave them out",
            field="output_token_ids",
        )
    most, count = request.params.max_tokens, len(request.output_token_ids)
    if most is not None and count >= most:
        raise RequestError(
            f"output_token_ids are {count} tokens, and max_tokens {most} allows no more; the answer is "
            "complete",
            field="output_token_ids",
        )


def _check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    try:
        # min and max of a list take six times as long
        valid = np.frombuffer(array("I", ids), np.uint32).max() < vocab_size
    except OverflowError:  # negative, or beyond 32 bits
        valid = False
    if not valid:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(
            f"{name} must have token ids in [0, {vocab_size}), the vocabulary, got {bad}; check the "
            "tokenizer",
            field=name,
        )
