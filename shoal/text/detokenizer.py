"""Detokenizer: one answer's text as its tokens come, and the stop strings that end it.

It adds up bytes, so a token costs the same however long the answer is. The pieces joined are the text that
Tokenizer.decode gives. `spaces_between_special_tokens` changes nothing, because neither byte-level nor
SentencePiece decoding puts spaces there.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from shoal.api import TokenLogprobs
from shoal.sampling_params import SamplingParams
from shoal.text.tokenizer import Tokenizer

CONTEXT = 8  # prompt tokens that may hold the first half of a character
CHARACTER = 4  # bytes, at the most
REPLACEMENT = "\ufffd".encode()


def add_texts(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> None:
    """Fills in the text of each token."""
    for token_id, entry in logprobs.items():
        entry.decoded_token = tokenizer.token_text(token_id)


class Detokenizer:
    """The text of one answer. It holds back half a character until it is whole, and text that may yet become
    a stop string, so no stream shows part of either."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """prompt_token_ids: the text follows that of the prompt. Without them it is the text of the answer
        alone, which begins without a space."""
        self._pieces = tokenizer.shown_bytes if params.skip_special_tokens else tokenizer.token_bytes
        self._partial = b""  # the first bytes of a character
        self._strips_space = self._pieces.strips_first_space
        self._prompts_half = ""
        self._decode(self._end_of(prompt_token_ids))
        # What half a character at the prompt's end is shown as unless the answer completes it. The prompt's
        # own text has that already.
        self._prompts_half = self._partial.decode("utf-8", self._pieces.errors)
        self._strips_space = self._strips_space and not self._prompts_half
        self._stops = tuple(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._num_exempt = params.min_tokens  # tokens yet to come in which no stop string can end
        self._held = ""  # the start of a stop string, perhaps

    def _end_of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens in which the prompt's last character lies, and some of its text before that."""
        size, first = 0, len(token_ids)
        while size < CHARACTER and 0 < first > len(token_ids) - CONTEXT:
            first -= 1
            size += len(self._pieces[token_ids[first]])
        return token_ids[first:]

    def push(
        self, token_ids: Sequence[int], *, last: bool = False, drop_last: bool = False
    ) -> tuple[str, str | None]:
        """Returns the new text, and the stop string that ends the answer if there is one. The text ends
        before that string, or behind it under include_stop_str_in_output.

        last: nothing follows, so nothing is held back. drop_last: the last id is a stop token; its text is
        shown only where that of a stop string is.
        """
        shown = token_ids[:-1] if drop_last and not self._include_stop else token_ids
        if not self._stops:
            return self._decode(shown, last), None
        text = self._held
        if exempt := self._num_exempt:
            self._num_exempt = max(0, exempt - len(token_ids))
            text += self._decode(shown[:exempt])
            shown = shown[exempt:]
        # A stop string that ends in text[:checked] does not count: it would have been found, or it came
        # before min_tokens.
        checked = len(text)
        text += self._decode(shown, last)
        if (found := self._find_stop(text, checked)) is not None:
            end, start, stop = found
            return text[: end if self._include_stop else start], stop
        safe = len(text) if last else self._end_of_safe(text)
        self._held = text[safe:]
        return text[:safe], None

    def _decode(self, token_ids: Sequence[int], last: bool = False) -> str:
        data = self._partial + b"".join([self._pieces[i] for i in token_ids])
        text, used = codecs.utf_8_decode(data, self._pieces.errors, last)
        self._partial = data[used:]
        if self._prompts_half and text:
            if not data.startswith(REPLACEMENT):  # a whole U+FFFD, whose end is the answer's
                text = text.removeprefix(self._prompts_half)
            self._prompts_half = ""
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def _find_stop(self, text: str, checked: int) -> tuple[int, int, str] | None:
        """Returns (end, start, stop string) of the stop string that is complete first, and of several that
        end there the longest. So the result does not depend on how tokens were grouped."""
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, checked - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)

    def _end_of_safe(self, text: str) -> int:
        """Returns the length of `text` without its longest tail that may begin a stop string."""
        safe = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < safe and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                safe = min(safe, at)
        return safe
