"""Builds a `tokenizers` backend from GGUF metadata, as the format defines it: byte-level BPE ("gpt2"),
SentencePiece ("llama") or BPE of characters ("gemma4").

The metadata has the vocabulary and the merges, but only the name of the pre-tokenizer. PRE_TOKENIZERS has the
rules of the published tokenizer.json files with these names. weights/gguf/ reads the file, and tokenizer.py
uses the backend.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from shoal.errors import CheckpointError

logger = logging.getLogger(__name__)

# The builder visits every split of every token of a SentencePiece vocabulary, so its size needs a bound.
# Published vocabularies have up to 2 million characters, and up to 64 in a token.
MAX_CHARACTERS, MAX_TOKEN_LEN = 16 << 20, 512
WAY_OUT = "convert the model again, or give another tokenizer with the option `tokenizer`"


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4  # Matched as a whole, and shown in decoded text, such as <think>.
    UNUSED = 5  # Pads the vocabulary to the size of the embedding.
    BYTE = 6  # one byte, written as <0x0A>


ADDED_TYPES = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED})


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Rules for splitting a text before BPE. Each pattern splits the pieces that the earlier patterns have
    left."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # True: a piece that is a token is not split, regardless of the merges.
    add_bos: bool = False  # Default; the file may have another value.


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = (  # marks are letters
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN_FREE_UPPER, _HAN_FREE_LOWER = (f"{own[:-1]}&&[^\\p{{Han}}]]" for own in (_UPPER, _LOWER))
_KIMI_K2 = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}*{_HAN_FREE_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_FREE_UPPER}+{_HAN_FREE_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
# A character that a normal form of Unicode would replace has its number here, as editors replace them.
_CASED = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)

# the patterns of DeepSeek V3's tokenizer.json: digits, Chinese and Japanese, then words and punctuation
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (  # punctuation takes no newlines
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (  # adjacent words stay together
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits from the right
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    _DEEPSEEK_V3[-1],
)

_GPT2_KIND = PreTokenizer((_GPT2,))
_LLAMA3_KIND = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_KIND = PreTokenizer((_QWEN2,), nfc=True)
_QWEN2_RAW_KIND = PreTokenizer((_QWEN2,))
_O200K_KIND = PreTokenizer((_O200K,))
_DEEPSEEK_V3_KIND = PreTokenizer(_DEEPSEEK_V3)
_BAILING_KIND = PreTokenizer((_BAILING,))
_DIGITS_KIND = PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_KIND,
    "a.x-4.0": _GPT2_KIND,
    "exaone4": _GPT2_KIND,
    "gigachat": _GPT2_KIND,
    "granite-docling": _GPT2_KIND,
    "mellum": _GPT2_KIND,
    "modern-bert": _GPT2_KIND,
    "mpt": _GPT2_KIND,
    "olmo": _GPT2_KIND,
    "trillion": _GPT2_KIND,
    "smollm": _DIGITS_KIND,
    "starcoder": _DIGITS_KIND,
    "refact": _DIGITS_KIND,
    "minerva-7b": _DIGITS_KIND,
    "codeshell": _DIGITS_KIND,
    "command-r": _DIGITS_KIND,
    "exaone": _DIGITS_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "pixtral": _LLAMA3_KIND,
    "falcon-h1": _LLAMA3_KIND,
    "midm-2.0": _LLAMA3_KIND,
    "lfm2": _LLAMA3_KIND,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "grok-2": _QWEN2_RAW_KIND,
    "hunyuan": _QWEN2_RAW_KIND,
    "megrez": _QWEN2_RAW_KIND,
    "solar-open": _QWEN2_RAW_KIND,
    "stablelm2": _QWEN2_RAW_KIND,
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "kimi-k2": PreTokenizer((_KIMI_K2,)),
    "gpt-4o": _O200K_KIND,
    "kanana2": _O200K_KIND,
    "llama4": _O200K_KIND,
    "minimax-m2": _O200K_KIND,
    "deepseek-v3": _DEEPSEEK_V3_KIND,
    "hunyuan-dense": _DEEPSEEK_V3_KIND,
    "joyai-llm": _DEEPSEEK_V3_KIND,
    "bailingmoe": _BAILING_KIND,
    "bailingmoe2": _BAILING_KIND,
    "llada-moe": _BAILING_KIND,
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    "tiny_aya": PreTokenizer((_THREES, _O200K)),
    "superbpe": PreTokenizer((r"\p{N}+", _THREES)),
    "afmoe": PreTokenizer(_AFMOE),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", r"\s?" + _CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
}

# A chat model ends a turn with one of these tokens and a document with another. A file names only one of them
# as end of text.
END_TOKENS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<eos>",
        "<|observation|>",  # GLM's answer with calls
    }
)
GEMMA4 = "gemma4"
# Its answers end with one of these, which files may list as ordinary tokens.
GEMMA4_END_TOKENS = ("<eos>", "<turn|>", "<|tool_response>")
# Harmony's messages end with "<|end|>", and its answers with one of these.
HARMONY_END_TOKENS = frozenset({"<|return|>", "<|call|>"})
# Special tokens of Phi-3 and 3.5 take the white space after them, but for these. No metadata says it.
PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_backend(metadata: Mapping[str, Any]) -> Backend:
    """Returns the backend. Raises CheckpointError if the kind of tokenizer or pre-tokenizer is unknown, or if
    metadata is missing or contradicts itself."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _list(metadata, "tokens", str)
    types: list[int] = [TokenType.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list(metadata, "token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; {WAY_OUT}"
        )
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        backend = _byte_level(tokens, types, _merges(metadata), pre)
        add_bos = pre.add_bos
    elif kind == GEMMA4:
        backend = _characters(tokens, types, _merges(metadata), special_tokens(metadata).get("unk_token"))
        # The first published files say no, so that llama.cpp does not ask them either (its PR 21500).
        metadata = {**metadata, "tokenizer.ggml.add_bos_token": True}
        add_bos = True
    elif kind == "llama":
        scores = _list(metadata, "scores", float, int)
        if len(scores) != len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens; {WAY_OUT}"
            )
        backend = _sentencepiece(
            tokens, types, scores, bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        )
        add_bos = True
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model must be 'gpt2', 'llama' or 'gemma4', got {kind!r:.80}; {WAY_OUT}"
        )
    added = {token: TokenType(of) for token, of in zip(tokens, types) if of in ADDED_TYPES}
    is_phi3 = kind == "llama" and metadata.get("general.architecture") == "phi3"
    tokens_of: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, of in added.items():
        rstrip = is_phi3 and token not in PHI3_UNSTRIPPED
        tokens_of[of is not TokenType.USER_DEFINED].append(AddedToken(token, normalized=False, rstrip=rstrip))
    backend.add_special_tokens(tokens_of[True])
    backend.add_tokens(tokens_of[False])
    names = special_tokens(metadata)
    _set_ends(
        backend,
        names.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        names.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return backend


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns {"bos_token": text, ...} with the roles that the file names."""
    tokens = _list(metadata, "tokens", str)
    default_ids = _DEFAULT_IDS["llama"] if metadata.get("tokenizer.ggml.model") == "llama" else {}
    ids = {role: _id(metadata, key, default_ids.get(key)) for role, key in _ROLES.items()}
    return {role: tokens[i] for role, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def end_token_ids(metadata: Mapping[str, Any], backend: Backend) -> list[int]:
    """Returns every id that ends an answer: the ones named in the file, then special tokens that do so in any
    chat model."""
    named = [_id(metadata, key) for key in ("eos", "eot", "eom")]
    special = {
        token.content: i for i, token in sorted(backend.get_added_tokens_decoder().items()) if token.special
    }
    ends = END_TOKENS | (HARMONY_END_TOKENS if special.keys() >= HARMONY_END_TOKENS else {"<|end|>"})
    known = [i for text, i in special.items() if text in ends]
    if metadata.get("tokenizer.ggml.model") == GEMMA4:
        known += [i for text in GEMMA4_END_TOKENS if (i := backend.token_to_id(text)) is not None]
    return list(dict.fromkeys(i for i in (*named, *known) if i is not None))


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the file's chat templates by name; tokenizer.chat_template itself is "default". Raises
    CheckpointError for a template that is not text."""
    key = "tokenizer.chat_template"
    templates = {}
    for name, template in metadata.items():
        if template is None or (name != key and not name.startswith(f"{key}.")):
            continue
        if not isinstance(template, str):
            raise CheckpointError(f"{name} of the GGUF file must be text, got {template!r:.80}; {WAY_OUT}")
        if template:
            templates[name.removeprefix(key).removeprefix(".") or "default"] = template
    return templates


def _list(metadata: Mapping[str, Any], name: str, *kinds: type) -> list[Any]:
    """Returns the list tokenizer.ggml.<name>. Raises CheckpointError unless all its values have one of these
    types."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        raise CheckpointError(f"the GGUF file has no tokenizer.ggml.{name}; {WAY_OUT}")
    if not isinstance(values, list) or not set(map(type, values)) <= set(kinds):
        raise CheckpointError(
            f"tokenizer.ggml.{name} must be a list of {kinds[0].__name__}, got {values!r:.80}; {WAY_OUT}"
        )
    return values


def _id(metadata: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    if value is not None and type(value) is not int:
        raise CheckpointError(
            f"tokenizer.ggml.{name}_token_id must be a token id, got {value!r:.80}; {WAY_OUT}"
        )
    return value


def _set_ends(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Sets the tokens that `encode` adds before and after a text, if the vocabulary has them."""
    ends = {t: i for t in (bos, eos) if t is not None and (i := backend.token_to_id(t)) is not None}
    single = [*([bos] if bos in ends else []), "$A", *([eos] if eos in ends else [])]
    backend.post_processor = TemplateProcessing(single=single, special_tokens=list(ends.items()))


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning(
            "the GGUF file names no pre-tokenizer (tokenizer.ggml.pre): 'default' is used, as in llama.cpp; "
            "better: %s",
            WAY_OUT,
        )
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}, got {name!r:.80}; {WAY_OUT}"
        )
    return PRE_TOKENIZERS[name]


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Backend:
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise CheckpointError(f"the tokenizer in the GGUF file is damaged: {error}; {WAY_OUT}") from None


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for merge in _list(metadata, "merges", str):
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(f"tokenizer.ggml.merges must be pairs, got {merge!r:.80}; {WAY_OUT}")
        pairs.append((left, right))
    return pairs


def _byte_level(
    tokens: list[str], types: list[int], merges: list[tuple[str, str]], pre: PreTokenizer
) -> Backend:
    backend = _bpe(_vocabulary(tokens, types), merges, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    tokens: list[str], types: list[int], scores: list[float], add_space_prefix: bool
) -> Backend:
    """Builds a SentencePiece tokenizer as BPE. SentencePiece joins the two neighbours whose joint piece has
    the best score, so every split of a piece into two pieces becomes a merge; the best piece's come first."""
    if sum(map(len, tokens)) > MAX_CHARACTERS or max(map(len, tokens), default=0) > MAX_TOKEN_LEN:
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {sum(map(len, tokens))} characters, up to "
            f"{max(map(len, tokens))} a token, more than the {MAX_CHARACTERS} and "
            f"{MAX_TOKEN_LEN} allowed; {WAY_OUT}"
        )
    if not all(map(math.isfinite, scores)):
        raise CheckpointError(f"tokenizer.ggml.scores must be finite numbers; {WAY_OUT}")
    mergeable = {TokenType.NORMAL.value, TokenType.USER_DEFINED.value}
    score_of = {t: s for t, kind, s in zip(tokens, types, scores) if kind in mergeable}
    merges = [
        (left, right)
        for piece in sorted(score_of, key=score_of.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in score_of and (right := piece[cut:]) in score_of
    ]
    unknown = next((t for t, kind in zip(tokens, types) if kind == TokenType.UNKNOWN), None)
    return _characters(tokens, types, merges, unknown, add_space_prefix)


def _characters(
    tokens: list[str],
    types: list[int],
    merges: list[tuple[str, str]],
    unknown: str | None,
    add_space_prefix: bool = False,
) -> Backend:
    """Builds a BPE that merges across words: spaces become ▁, and a character without a token becomes its
    bytes."""
    backend = _bpe(
        _vocabulary(tokens, types),
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if add_space_prefix else spaces
    )
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    unused = TokenType.UNUSED.value
    return {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind != unused}
