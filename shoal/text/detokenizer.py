"""Detokenizer: the text of an answer's tokens as they arrive, and the stop strings that end it.

It joins bytes, so the cost of a token does not depend on the length of the answer. The joined pieces equal
the text of Tokenizer.decode. `spaces_between_special_tokens` has no effect, because neither byte-level nor
SentencePiece decoding puts spaces there.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from shoal.api import TokenLogprobs
from shoal.sampling_params import SamplingParams
from shoal.text.tokenizer import Tokenizer

CONTEXT = 8  # prompt tokens that may have the first bytes of a character
CHARACTER = 4  # bytes, at the most
REPLACEMENT = "\ufffd".encode()


def add_texts(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> None:
    """Adds the text of each token."""
    for token_id, entry in logprobs.items():
        entry.decoded_token = tokenizer.token_text(token_id)


class Detokenizer:
    """The text of one answer. It holds back an incomplete character, and text that may become a stop string,
    so streams never show a part of either."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """prompt_token_ids: the text continues the prompt's text. Without them it is a separate text, which
        begins without a space."""
        self._pieces = tokenizer.shown_bytes if params.skip_special_tokens else tokenizer.token_bytes
        self._partial = b""  # the first bytes of a character
        self._strips_space = self._pieces.strips_first_space
        self._prompts_half = ""
        self._decode(self._end_of(prompt_token_ids))
        # The text of an incomplete character at the prompt's end, unless the answer completes it. The
        # prompt's own text has it already.
        self._prompts_half = self._partial.decode("utf-8", self._pieces.errors)
        self._strips_space = self._strips_space and not self._prompts_half
        self._stops = tuple(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._num_exempt = params.min_tokens  # next tokens in which no stop string can end
        self._held = ""  # possibly the start of a stop string

    def _end_of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens with the prompt's last character, and some text before it."""
        size, first = 0, len(token_ids)
        while size < CHARACTER and 0 < first > len(token_ids) - CONTEXT:
            first -= 1
            size += len(self._pieces[token_ids[first]])
        return token_ids[first:]

    def push(
        self, token_ids: Sequence[int], *, last: bool = False, drop_last: bool = False
    ) -> tuple[str, str | None]:
        """Returns the new text, and the stop string that ends the answer if there is one. The text ends
        before that string, or after it with include_stop_str_in_output.

        last: these are the last tokens, so no text is held back. drop_last: the last id is a stop token,
        whose text is shown only if include_stop_str_in_output.
        """
        shown = token_ids[:-1] if drop_last and not self._include_stop else token_ids
        if not self._stops:
            return self._decode(shown, last), None
        text = self._held
        if exempt := self._num_exempt:
            self._num_exempt = max(0, exempt - len(token_ids))
            text += self._decode(shown[:exempt])
            shown = shown[exempt:]
        # A stop string that ends in text[:checked] does not count: it was found before, or it came before
        # min_tokens.
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
            if not data.startswith(REPLACEMENT):  # a complete U+FFFD whose last bytes are the answer's
                text = text.removeprefix(self._prompts_half)
            self._prompts_half = ""
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def _find_stop(self, text: str, checked: int) -> tuple[int, int, str] | None:
        """Returns (end, start, stop string) of the stop string that is complete first, the longest one of
        several with this end. So the result does not depend on the grouping of tokens."""
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
