"""All formats: which one a chat template asks for, and by its name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.text.formats.cohere import CohereCommand
from shoal.text.formats.deepseek import DeepSeekV3, DeepSeekV31
from shoal.text.formats.deepseek_dsml import DeepSeekV4, DeepSeekV32
from shoal.text.formats.gemma4 import FunctionGemma, Gemma4
from shoal.text.formats.glm45 import Glm45
from shoal.text.formats.granite import Granite
from shoal.text.formats.harmony import Harmony
from shoal.text.formats.hermes import Ernie45, Hermes
from shoal.text.formats.hunyuan import HunyuanA13B, HyV3
from shoal.text.formats.internlm import InternLM
from shoal.text.formats.kimi_k2 import KimiK2
from shoal.text.formats.lfm2 import Lfm2
from shoal.text.formats.llama3_json import Llama3Json
from shoal.text.formats.minimax_m2 import MiniMaxM2
from shoal.text.formats.mistral import Mistral
from shoal.text.formats.muse import Muse
from shoal.text.formats.nemotron_nano import NemotronNano
from shoal.text.formats.olmo3 import Olmo3
from shoal.text.formats.phi4_mini import Phi4Mini
from shoal.text.formats.pythonic import Llama4Pythonic
from shoal.text.formats.qwen3_coder import Qwen3Coder
from shoal.text.formats.seed_oss import SeedOss
from shoal.text.reading.chat_format import ChatFormat, PlainFormat
from shoal.text.reading.messages import Messages
from shoal.text.reading.thoughts import THOUGHTS, Thoughts

# In this order, as some signs contain others: the first format in a template is the model's.
FORMATS: tuple[ChatFormat, ...] = (
    Harmony(),
    Muse(),
    Gemma4(),
    FunctionGemma(),
    DeepSeekV32(),
    DeepSeekV4(),
    DeepSeekV3(),
    DeepSeekV31(),
    KimiK2(),
    MiniMaxM2(),
    HyV3(),
    Glm45(),
    SeedOss(),
    Qwen3Coder(),
    Mistral(),
    Lfm2(),
    Olmo3(),
    Phi4Mini(),
    Llama4Pythonic(),
    CohereCommand(),
    Granite(),
    NemotronNano(),
    InternLM(),
    HunyuanA13B(),
    Ernie45(),
    Hermes(),
    Llama3Json(),
)
PLAIN = PlainFormat()
BY_NAME: dict[str, ChatFormat] = {form.name: form for form in FORMATS}
BY_MESSAGES = {form.thoughts.name: form for form in FORMATS if isinstance(form, Messages) and form.thoughts}
THOUGHTS_BY_NAME: dict[str, Thoughts] = {thoughts.name: thoughts for thoughts in THOUGHTS}
DEFAULT = "hermes"
TOOLS = re.compile(r"\btools\b")


def form_of(parser: str, reasoning: str = "none") -> ChatFormat:
    """Returns the format of this name; one without calls for "none". Reasoning that is a message of its own
    belongs to a format whose answers are messages, so that format is returned whatever `parser` is."""
    return BY_MESSAGES.get(reasoning) or BY_NAME.get(parser, PLAIN)


def choose(template: str, added_tokens: Sequence[str] = ()) -> tuple[str, str | None]:
    """Returns the name of the format for a chat template, and a warning if the template has a format of calls
    that is not known. Where it has tools and no sign of a format, the tokenizer's added tokens decide."""
    has_tools = TOOLS.search(template)
    for text in (template, " ".join(added_tokens)) if has_tools else (template,):
        for form in FORMATS:
            if form.is_of(text):
                return form.name, None
    if has_tools:
        return (
            DEFAULT,
            f"the chat template shows tools and names no form of calls that is known ({DEFAULT} is read)",
        )
    return DEFAULT, None


def choose_thoughts(template: str) -> str:
    """Returns the name of the reasoning format for a chat template, or "none"."""
    own = BY_NAME[choose(template)[0]].thoughts
    if own is not None:
        return own.name
    for thoughts in THOUGHTS:
        if any(sign in template for sign in thoughts.signs):
            return thoughts.name
    return "none"
