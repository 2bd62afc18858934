"""Marks of families around reasoning, and the place where an answer begins, by the end of its prompt."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from shoal.text.reading.marks import SPACE

# A mark of chat templates that begins or ends a turn, and the head of a turn: a mark, a role, and possibly
# empty reasoning, which Qwen3's template writes before the last answer.
MARK = (
    r"(?:<\|[^<>|\n]{1,40}\|?>|<[^<>|\n]{1,40}\|>|<｜[^<>\n]{1,40}｜>|\[/?[A-Z_]{4,20}\]|\]~b\]|\[e~\[|</?s>"
)
MARK += r"|<(?:start|end)_of_turn>|<seed:[be]os>|<(?:user|assistant|system|tool)>)"
TURN_MARK = re.compile(MARK)
HEAD = re.compile(rf"{MARK}\s*\w{{0,16}}\s*(?:<think>\s*</think>\s*)?\Z")
HEAD_LENGTH = 200  # characters of a prompt in which a head is searched


class Start(enum.Enum):
    """The place where an answer begins."""

    UNKNOWN = "the model may open its reasoning"
    INSIDE = "the prompt has opened reasoning"
    AMID = "the prompt ends with unfinished reasoning, which the answer continues without a change"
    AFTER = "the prompt has closed reasoning"


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around reasoning.

    name: vLLM's name of its parser. signs: texts of chat templates with these marks. anywhere: reasoning may
    begin later than the answer does, because no words contain the marks. forced: the text that a budget
    appends to end reasoning, so that the answer comes next; "": `close`. turn: the text between reasoning and
    the next message, which a grammar of calls continues. words: the same with the head of a message to the
    user, which another grammar continues; "": the rest of `forced`.
    """

    name: str
    open: str
    close: str
    signs: tuple[str, ...]
    anywhere: bool = False
    forced: str = ""
    turn: str = ""
    words: str = ""

    def start_of(self, prompt: str) -> Start:
        """Returns where an answer to this prompt begins."""
        end = prompt.rstrip(SPACE)
        if end.endswith(self.open):
            return Start.INSIDE
        if end.endswith(self.close):
            return Start.AFTER
        begun = prompt.rfind(self.open)
        if begun < 0:
            return Start.UNKNOWN
        rest = prompt[begun + len(self.open) :]
        # Reasoning of an earlier turn is followed by the mark of a later one.
        if self.close in rest or TURN_MARK.search(rest):
            return Start.UNKNOWN
        is_head = HEAD.search(prompt[max(0, begun - HEAD_LENGTH) : begun]) is not None
        return Start.AMID if is_head else Start.UNKNOWN


THINK = Thoughts("qwen3", "<think>", "</think>", ("<think>", "</think>"))
BRACKETS = Thoughts("mistral", "[THINK]", "[/THINK]", ("[THINK]",), anywhere=True)
CHANNEL = Thoughts("gemma4", "<|channel>thought", "<channel|>", ("<|channel>",), anywhere=True)
HARMONY = Thoughts(
    "openai_gptoss",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    (),
    anywhere=True,
    forced="<|end|><|start|>assistant<|channel|>final<|message|>",
    turn="<|start|>assistant",
)
TO_SELF = Thoughts(
    "muse_glimmer",
    " to=self<|message|>",
    "<|eom|>",
    (),
    anywhere=True,
    forced="<|eom|><|start|>assistant",
    turn="<|start|>assistant",
    words="<|start|>assistant to=user<|message|>",
)
COHERE = Thoughts(
    "cohere_command3",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    ("<|START_THINKING|>", "<|START_RESPONSE|>"),
    anywhere=True,
)
SEED = Thoughts("seed_oss", "<seed:think>", "</seed:think>", ("<seed:think>",))
THINK_OPEN_SOURCE = Thoughts("hy_v3", "<think:opensource>", "</think:opensource>", (":opensource",))
SENTENCES = Thoughts(
    "granite", "Here is my thought process:", "Here is my response:", ("Here is my thought process",)
)
# In this order, as templates of the first ones may speak of <think>.
THOUGHTS: tuple[Thoughts, ...] = (
    HARMONY,
    TO_SELF,
    CHANNEL,
    BRACKETS,
    COHERE,
    SEED,
    THINK_OPEN_SOURCE,
    SENTENCES,
    THINK,
)
