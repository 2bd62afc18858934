"""`EarlierAnswers`: keeps the last answers of an engine on the host, and chooses those in which the drafts of
a new sequence are looked up. engine/answer_keeper.py adds answers; sender.py sends the chosen ones to the
device, before the sequence's own tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_EARLIER = 4096  # tokens of earlier answers in which a sequence's drafts are looked up
MOST_KEPT = 1 << 22  # tokens of all answers, 4 bytes each
LEAD = 8  # tokens of the prompt that are kept before an answer, so that its first ones are found
FEWEST = 8  # a shorter answer is not worth its place
# Prompts are compared by runs of RUN tokens among the first REGION tokens and the last: requests for the same
# task begin or end with the same words. Of each region the PICKED runs with the smallest hashes count.
RUN, REGION, PICKED = 4, 256, 32
NO_MARK = 0  # in a sketch: a place without a run
HASH = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)


@dataclass(frozen=True, slots=True)
class _Answer:
    number: int  # how many answers were added before it
    tokens: np.ndarray  # int32, LEAD tokens of the prompt included


class EarlierAnswers:
    """At most `most` answers, each with the root of its keys, which names adapter and salt: a sequence gets
    answers of its own root alone. A full store drops the oldest ones."""

    def __init__(self, most: int) -> None:
        self._most, self._num_added, self._num_tokens = most, 0, 0
        self._answers: deque[_Answer] = deque()  # the oldest first
        # An answer's place in these is its number modulo `most`. Sketches have 16 bits of each picked hash.
        self._sketches = np.full((most, 2 * PICKED), NO_MARK, np.uint16)
        self._roots = np.zeros((most, 2), np.uint64)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def num_tokens(self) -> int:
        """The tokens that are kept of all answers."""
        return self._num_tokens

    def add(self, root: bytes, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keeps the answer to a prompt; only the beginning of a long one, and none with fewer than FEWEST
        tokens."""
        if len(answer) < FEWEST:
            return
        lead = prompt[max(0, len(prompt) - LEAD) :]
        tokens = np.array([*lead, *answer[: MOST_EARLIER - len(lead)]], np.int32)
        while self._answers and (
            len(self._answers) == self._most or self._num_tokens + len(tokens) > MOST_KEPT
        ):
            self._num_tokens -= len(self._answers.popleft().tokens)
        place = self._num_added % self._most
        self._sketches[place] = _sketch(prompt)
        self._roots[place] = np.frombuffer(root, np.uint64)
        self._answers.append(_Answer(self._num_added, tokens))
        self._num_added += 1
        self._num_tokens += len(tokens)

    def tokens_for(self, root: bytes, prompt: Sequence[int]) -> list[int]:
        """Returns at most MOST_EARLIER tokens, of the answers to the prompts that are most similar to this
        one. The answer to the most similar prompt comes last, and among equals the newest, as a look-up that
        finds many places prefers the last ones. Answers to prompts less than half as similar are left
        out."""
        if not self._answers:
            return []
        places = np.arange(self._answers[0].number, self._num_added) % self._most
        is_own = (self._roots[places] == np.frombuffer(root, np.uint64)).all(1)
        own = np.flatnonzero(is_own)
        if not len(own):
            return []
        marks = np.zeros(1 << 16, bool)
        marks[_sketch(prompt)] = True
        marks[NO_MARK] = False
        similarities = marks[self._sketches[places[own]]].sum(1)
        most_similar = int(similarities.max())
        if not most_similar:
            return []
        order = np.lexsort((-own, -similarities))
        parts: list[np.ndarray] = []
        room = MOST_EARLIER
        for i in order.tolist():
            if not room or 2 * int(similarities[i]) < most_similar:
                break
            parts.append(self._answers[int(own[i])].tokens[:room])
            room -= len(parts[-1])
        found: list[int] = np.concatenate(parts[::-1]).tolist()
        return found


def _sketch(prompt: Sequence[int]) -> np.ndarray:
    """Returns the marks of a prompt, uint16 [2 * PICKED]. The more marks two prompts have in common, the more
    similar are their beginnings and ends."""
    sketch = np.full((2, PICKED), NO_MARK, np.uint16)
    ends = max(REGION, len(prompt) - REGION)
    for marks, part in zip(sketch, (prompt[:REGION], prompt[ends:])):
        tokens = np.array(part, np.uint64)
        if len(tokens) < RUN:
            continue
        runs = np.lib.stride_tricks.sliding_window_view(tokens, RUN)
        hashes = np.unique(_mixed(((runs + np.uint64(1)) * HASH).sum(1, dtype=np.uint64)))[:PICKED]
        marks[: len(hashes)] = hashes & np.uint64(0xFFFF)
    return sketch.reshape(-1)


def _mixed(hashes: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ (hashes >> np.uint64(29))) * HASH[1]
    return hashes ^ (hashes >> np.uint64(32))
