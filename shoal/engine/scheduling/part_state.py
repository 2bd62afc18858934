"""State that parts of an engine keep in a sequence: its grammar, its completed fetches, a prefetched tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class GrammarState(Protocol):
    """A grammar as the scheduler uses it (engine/scheduling/grammar.py)."""

    ended: bool
    error: str | None

    @property
    def is_ready(self) -> bool:
        """True if a step may sample the next token now. False while the mask of allowed tokens is computed in
        the background."""
        ...

    def accept(self, token_id: int) -> bool:
        """Applies a sampled token. Returns False and sets `error` if the sequence cannot continue. After the
        last token `ended` is true."""
        ...

    def close(self) -> None:
        """Frees the grammar after the sequence has ended."""
        ...


@dataclass(slots=True)
class GrammarRow:
    """A sample whose token must fit a grammar, and must be allowed and not banned by the request too."""

    sample: int
    grammar: GrammarState
    banned: list[int]
    allowed: list[int] | None


@dataclass(frozen=True, slots=True)
class CompletedFetch:
    """A completed fetch of KV blocks for a sequence. `begun_at`: seconds of the core's clock."""

    source: str  # tiers below the device, or "worker"
    begun_at: float
    seconds: float
    num_blocks: int  # 0: none arrived, so they are computed


@dataclass(frozen=True, slots=True)
class Tail:
    """The blocks of a prompt, of which the last ones are not full: they have the KV of the tokens after the
    last full ones."""

    tables: list[list[int]]  # a table for each group of layers
    end: int  # number of tokens up to the tail's last
    keys: list[bytes]  # keys of the prompt's blocks, with the tail's last
    generation: int  # the pool's, of `block`: another one if the block was taken for something else

    @property
    def block(self) -> int:
        """The last block of the first table."""
        return self.tables[0][-1]
