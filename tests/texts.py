"""Texts on which tokenizers differ, and small vocabularies trained on the spot: a byte-level
one, a SentencePiece one and Gemma 4's."""

from __future__ import annotations

import functools
import io
import json
import random
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "",
    " ",
    "a",
    " a",
    "  two  spaces\n\n\ttab ",
    "1234567 + 89 = ?  1 22 333",
    "naïve café 東京 🚀👩‍👩‍👧",
    "def f(x):\n    return x\r\n\r\n",
    "It's we'LL I'd've",
    "Ⅻ ½ ٣٤ 四五",
    "ÅÅ ﬁ e\u0301",
    "<s>[INST] hi [/INST]</s>",
    "<think>x</think>\n",
    "UPPERlower CamelCaseWord",
    "...!!?? --->",
    "\u00a0\u3000\u2003x",
    "\x00\x01\x7f",
    "Привет, мир! Γειά σου Κόσμε مرحبا हिन्दी",
    "a" * 300,
    "▁▁x ▁ y",
    " \n \n\n  z",
    "don't stop\u2019s",
    "https://a.b/c?d=e&f#g",
    "//// */\n/n",
]
ALPHABET = list("abcdefghij ABC'019 \n\t.,<>|_▁é\u0301東🚀ß½\u00a0\r/#-")
LESSON = [
    "The quick brown fox jumps over the lazy dog. It's said that we'll see 1234 foxes, 56 dogs and 7 cats "
    "in 2026.",
    "def return_value(self, x):\n    return self.value + x  # the value of it\n",
    "naïve café, naïve cafés; 東京 and 東京都; Привет мир, привет миру",
    "HTTPServer CamelCase lowerCase UPPER; don't, can't, won't, DON'T; 100 1000 10000 000 11 222 33",
    "\n\n\t\t    spaces   and\n  tabs \n \n",
] * 20


def random_texts(seed: int, count: int = 150) -> list[str]:
    print(f"random texts from seed {seed}")
    r = random.Random(seed)
    return ["".join(r.choices(ALPHABET, k=r.randint(1, 60))) for _ in range(count)]


@functools.cache
def byte_level_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens, merges) that cross every border that pre-tokenizers may draw: a missing split changes the
    ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    lines = [part for text in LESSON for part in (text, *(text[i : i + 9] for i in range(0, len(text), 7)))]
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=1500,
            min_frequency=2,
            show_progress=False,
            max_token_length=12,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    vocab = tokenizer.get_vocab()
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocab, key=vocab.__getitem__), [tuple(m) for m in merges]


def byte_level_metadata(
    pre: str, control: tuple[str, ...] = (), user_defined: tuple[str, ...] = (), unused: int = 0, **more: Any
) -> dict[str, Any]:
    """Returns a GGUF file's fields for `byte_level_vocabulary` with these tokens after it."""
    tokens, merges = byte_level_vocabulary()
    added = [*control, *user_defined, *(f"[PAD{i}]" for i in range(unused))]
    types = [1] * len(tokens) + [3] * len(control) + [4] * len(user_defined) + [5] * unused
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *added],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(m) for m in merges],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@functools.cache
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """As Llama 2's was trained: BPE, byte fallback, no normalization."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LESSON),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(control: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    model = sentencepiece_model()
    pieces = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in pieces
    ]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*(model.id_to_piece(i) for i in pieces), *control],
        "tokenizer.ggml.scores": [*(model.get_score(i) for i in pieces), *(0.0 for _ in control)],
        "tokenizer.ggml.token_type": [*kinds, *(3 for _ in control)],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def gemma4_metadata(user_defined: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes Gemma 4's: merges between pieces of characters, bytes, and marks of calls as
    ordinary tokens."""
    pieces = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    trained = Tokenizer(pieces)
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("[^\n]+|\n+"), "isolated")
    control = ("<pad>", "<eos>", "<bos>", "<unk>", "<turn|>")
    raw = tuple(f"<0x{i:02X}>" for i in range(256))
    trained.train_from_iterator(
        LESSON, trainers.BpeTrainer(vocab_size=700, special_tokens=[*control, *raw], show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), *user_defined]
    kinds = {**dict.fromkeys(control, 3), **dict.fromkeys(raw, 6), **dict.fromkeys(user_defined, 4)}
    return {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def byte_level_backend(special: tuple[str, ...] = ()) -> Tokenizer:
    tokens, merges = byte_level_vocabulary()
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend
