"""Detokenizer: one answer's text as its tokens come, and the stop strings that end it.

It adds up bytes, so a token costs the same however long the answer is, and the pieces joined are the text that Tokenizer.decode gives.
spaces_between_special_tokens is not looked at: neither byte-level nor SentencePiece decoding ever puts a space there.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from shoal.api import SamplingParams
from shoal.tokenizer import Tokenizer

CONTEXT = 8    # prompt tokens that may hold the first half of a character: it has at most 4 bytes


class Detokenizer:
    """Half a character is held back until it is whole, and so is text that may yet become a stop string: no stream shows part of one."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        """With the prompt given, the text is what follows the prompt's; without, it is the text of the answer alone (no first space)."""
        self._pieces = tokenizer.shown_bytes if params.skip_special_tokens else tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(self._pieces.errors)
        context = b"".join([self._pieces[i] for i in prompt_token_ids[-CONTEXT:]])
        self._decoder.decode(context)
        self._strips_space = self._pieces.strips_first_space and not context
        self._stops = tuple(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._num_exempt = params.min_tokens    # tokens yet to come in which no stop string can end
        self._held = ""                         # the start of a stop string, perhaps

    def push(self, token_ids: Sequence[int], *, last: bool = False, drop_last: bool = False) -> tuple[str, str | None]:
        """(new text, the stop string that ends the answer). The text ends before that string, or with it under include_stop_str_in_output.

        last: nothing follows, so nothing is held back. drop_last: the last id is a stop token, whose text counts as a stop string's does.
        """
        shown = token_ids[:-1] if drop_last and not self._include_stop else token_ids
        exempt, self._num_exempt = self._num_exempt, max(0, self._num_exempt - len(token_ids))
        text = self._held + self._decode(shown[:exempt])
        checked = len(text)    # no stop string that ends in text[:checked] counts: there was none, or it came before min_tokens
        text += self._decode(shown[exempt:], last)
        if (found := self._find_stop(text, checked)) is not None:
            start, stop = found
            return text[:start + len(stop) if self._include_stop else start], stop
        safe = len(text) if last else self._end_of_safe(text)
        self._held = text[safe:]
        return text[:safe], None

    def _decode(self, token_ids: Sequence[int], last: bool = False) -> str:
        text = self._decoder.decode(b"".join([self._pieces[i] for i in token_ids]), last)
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def _find_stop(self, text: str, checked: int) -> tuple[int, str] | None:
        """The stop string that is complete first, the longest of those: so it does not matter how tokens are grouped into steps."""
        starts = [(text.find(stop, max(0, checked - len(stop) + 1)), stop) for stop in self._stops]
        return min((found for found in starts if found[0] >= 0), key=lambda found: (found[0] + len(found[1]), found[0]), default=None)

    def _end_of_safe(self, text: str) -> int:
        """The length of `text` without its longest tail that begins a stop string."""
        safe = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < safe and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if at >= 0:
                safe = min(safe, at)
        return safe
