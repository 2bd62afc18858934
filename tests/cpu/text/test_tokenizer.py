"""Tokenizers from a folder: ids and text of transformers, ids beyond the vocabulary, special tokens, bad
words."""

import json
import random

import pytest
import transformers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from shoal.errors import CheckpointError, RequestError
from shoal.text.tokenizer import Tokenizer, load_tokenizer
from tests import texts

SPECIAL = ("<s>", "</s>", "<|im_end|>")


def plain():
    return texts.byte_level_backend(SPECIAL)


def beginning():
    """Llama 3's way: tokenizer.json itself says that a text begins with <s>."""
    backend = plain()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def composing():
    """Qwen's way: NFC, and a split of its own."""
    backend = plain()
    backend.normalizer = normalizers.NFC()
    backend.add_tokens(["<think>"])
    return backend


def sentencepiece(normalizer, pre_tokenizer, decoder):
    backend = Tokenizer.from_gguf(texts.sentencepiece_metadata())._backend
    backend.normalizer, backend.decoder = normalizer, decoder
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return backend


def llama2():
    return sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )


def mistral3():
    return sentencepiece(
        None,
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )


FOLDERS = {
    "plain": (plain, {}),
    "begins by its post-processor": (beginning, {}),
    "settings that nobody reads": (plain, {"add_bos_token": True, "add_eos_token": True}),
    "composed characters": (composing, {"add_bos_token": False}),
    "llama 2": (llama2, {}),
    "mistral 3": (mistral3, {}),
}


def write(folder, backend=None, files=None, **settings):
    (backend or plain()).save(str(folder / "tokenizer.json"))
    end = {
        "__type": "AddedToken",
        "content": "</s>",
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    tokens = {"bos_token": "<s>", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **settings})
    )
    for name, content in (files or {}).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_text_are_those_of_transformers(name, tmp_path):
    build, settings = FOLDERS[name]
    write(tmp_path, build(), **settings)
    oracle, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in texts.TEXTS + texts.random_texts(seed=len(name)):
        for special in (True, False):
            assert tokenizer.encode(text, special) == oracle.encode(text, add_special_tokens=special), text
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            ), text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.get_vocab()) == (
        len(oracle),
        oracle.vocab_size,
        oracle.get_vocab(),
    )
    assert set(oracle.all_special_ids) <= set(tokenizer.all_special_ids)


def test_any_ids_decode_as_with_transformers(tmp_path):
    write(tmp_path)
    oracle, tokenizer, r = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        Tokenizer.from_folder(tmp_path),
        random.Random(1),
    )
    for _ in range(500):
        # 0 to 255 are bytes: broken characters
        ids = r.choices(range(256 if r.random() < 0.5 else len(tokenizer)), k=r.randint(1, 10))
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            ), ids


def test_ids_beyond_the_vocabulary_decode_to_nothing(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    ids = tokenizer.encode("naïve")
    padded = [len(tokenizer), ids[0], 10**6, *ids[1:], 2**40, -1]
    assert tokenizer.decode(padded) == tokenizer.decode(ids) == "naïve"
    assert tokenizer.token_text(len(tokenizer)) == ""
    assert tokenizer.decode(ids[0]) == tokenizer.token_text(ids[0])
    assert len(tokenizer.token_bytes) <= len(tokenizer)


def test_the_text_of_one_token_keeps_its_space_and_shows_special_tokens(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path, llama2()))
    quick = tokenizer.encode("the", add_special_tokens=False)[0]
    assert tokenizer.token_text(quick).startswith(" ")
    assert tokenizer.token_text(tokenizer.eos_token_id) == "</s>"


def test_it_answers_to_the_names_that_examples_use(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    ids = tokenizer.encode("the fox")
    assert tokenizer("the fox") == {"input_ids": ids} and tokenizer(["the fox", "a"])["input_ids"] == [
        ids,
        tokenizer.encode("a"),
    ]
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.convert_ids_to_tokens([tokenizer.eos_token_id, 10**6]) == ["</s>", None]


@pytest.mark.parametrize(
    "files, ends",
    [
        ({}, ["</s>"]),
        ({"generation_config.json": {"eos_token_id": [-3, -2]}}, ["</s>", "<|im_end|>"]),
        ({"config.json": {"eos_token_id": -2}, "generation_config.json": {}}, ["</s>", "<|im_end|>"]),
        (
            {"config.json": {"eos_token_id": -3}, "generation_config.json": {"eos_token_id": -2}},
            ["</s>", "<|im_end|>"],
        ),
    ],
)
def test_all_end_of_text_ids_are_found(files, ends, tmp_path):
    backend = plain()
    names = {-3 + i: backend.token_to_id(t) for i, t in enumerate(SPECIAL[1:])}

    def filled(value):
        return [names[v] for v in value] if isinstance(value, list) else names[value]

    tokenizer = Tokenizer.from_folder(
        write(tmp_path, backend, {n: {k: filled(v) for k, v in c.items()} for n, c in files.items()})
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_ids) == ends


def test_special_tokens_may_be_named_elsewhere_or_by_id_alone(tmp_path):
    backend = plain()
    files = {
        "special_tokens_map.json": {"pad_token": "<|im_end|>"},
        "config.json": {"bos_token_id": backend.token_to_id("<s>")},
    }
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend, files, bos_token=None))
    assert tokenizer.special_tokens_map == {
        "pad_token": "<|im_end|>",
        "eos_token": "</s>",
        "bos_token": "<s>",
    }


def test_an_end_token_that_nobody_marked_as_special_is_skipped(tmp_path):
    backend = texts.byte_level_backend()
    backend.add_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a</s>b")) == "ab"


def test_a_text_of_a_million_characters_comes_back(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path))
    text = texts.LESSON[2] * 15_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path):
    backend = plain()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    assert (
        Tokenizer.from_folder(write(tmp_path, backend)).encode("abcdef zyx")
        == plain().encode("abcdef zyx").ids
    )


@pytest.mark.parametrize("text", ["a\ud800", 5, None, ["a"]])
def test_what_is_no_text_is_refused(text, tmp_path):
    with pytest.raises(RequestError, match="must be a str without lone surrogates"):
        Tokenizer.from_folder(write(tmp_path)).encode(text)


def test_a_pattern_that_never_ends_is_an_error_of_the_request(tmp_path):
    backend = plain()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    with pytest.raises(
        RequestError, match=r"the model's tokenizer cannot encode the prompt 'aaa.*retry-limit"
    ):
        tokenizer.encode("a" * 50 + "!")
    with pytest.raises(RequestError, match="the model's tokenizer cannot encode the prompt"):
        tokenizer.encode("a" * 5000 + "!")
    assert tokenizer.encode("b") == backend.encode("b", add_special_tokens=True).ids


def test_a_character_without_a_token_is_an_error_of_the_request_if_the_model_has_none_for_unknown_ones(
    tmp_path,
):
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[], unk_token="<nowhere>"))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    for text in ("abc", "c" * 5000):
        with pytest.raises(
            RequestError, match=r"cannot encode the prompt .*<nowhere>.* not found in the vocab"
        ):
            tokenizer.encode(text)
    assert tokenizer.encode("ab") == [0, 1]


def test_bad_words_are_banned_at_the_start_and_after_a_space(tmp_path):
    tokenizer = Tokenizer.from_folder(write(tmp_path))

    def ids(text):
        return tuple(tokenizer.encode(text))

    def by_the_rule(word):
        bare, spaced = ids(word.lstrip()), ids(" " + word.lstrip())
        return (bare, spaced) if spaced[0] != bare[0] and len(spaced) == len(bare) else (bare,)

    words = ["the", " fox", "1234", "quick brown", "a", "zzz"]
    assert tokenizer.bad_word_ids(words, 1 << 20) == tuple(i for w in words for i in by_the_rule(w))
    assert {len(by_the_rule(w)) for w in words} == {1, 2}, "the words show both branches"
    with pytest.raises(RequestError, match="bad_words must have tokens"):
        tokenizer.bad_word_ids(["  "], 1 << 20)


@pytest.mark.parametrize(
    "damage, named",
    [
        ("missing", "tokenizer.json"),
        ("no JSON", "tokenizer.json"),
        ("settings", "tokenizer_config.json"),
        ("list", "generation_config.json"),
        ("decoder", "WordPiece"),
        ("no decoder", "decoder"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_file_named(damage, named, tmp_path):
    write(tmp_path)
    if damage == "missing":
        (tmp_path / "tokenizer.json").unlink()
    elif damage == "no JSON":
        (tmp_path / "tokenizer.json").write_text("{")
    elif damage == "settings":
        (tmp_path / "tokenizer_config.json").write_text("{")
    elif damage == "list":
        (tmp_path / "generation_config.json").write_text("[]")
    else:
        backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
        if damage == "decoder":
            backend.decoder = decoders.WordPiece()
        backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=named):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "template", [3, [3], [None], ["x"], [{}], [{"name": "a"}], {"a": 3}, [{"name": [], "template": "x"}]]
)
def test_a_chat_template_that_is_none_is_refused_with_the_file(template, tmp_path):
    write(tmp_path, chat_template=template)
    with pytest.raises(
        CheckpointError,
        match=r"tokenizer_config\.json: chat_template must be a template or templates by name",
    ):
        Tokenizer.from_folder(tmp_path)


class Files:
    def __init__(self, kind, folder, metadata):
        self.kind, self.folder, self.path, self.metadata = kind, folder, folder, metadata


def test_options_replace_the_tokenizer_and_its_template(tmp_path):
    (tmp_path / "other").mkdir()
    write(tmp_path, chat_template="own")
    write(tmp_path / "other", beginning(), {"template.jinja": "from a file"}, chat_template="other's")
    files = Files("hf", tmp_path, {})
    assert load_tokenizer(files).chat_template == "own"
    assert load_tokenizer(files, str(tmp_path / "other")).encode("") == [plain().token_to_id("<s>")]
    assert load_tokenizer(files, str(tmp_path / "other/tokenizer.json")).chat_template == "other's"
    assert load_tokenizer(files, chat_template="{{ messages }}").chat_template == "{{ messages }}"
    assert (
        load_tokenizer(files, chat_template=str(tmp_path / "other/template.jinja")).chat_template
        == "from a file"
    )
    gguf = Files(
        "gguf", tmp_path, {**texts.byte_level_metadata("qwen2"), "tokenizer.chat_template": "of the gguf"}
    )
    assert load_tokenizer(gguf).chat_template == "of the gguf"
    with pytest.raises(CheckpointError, match="no-such-file"):
        load_tokenizer(files, chat_template="no-such-file.jinja")
    with pytest.raises(CheckpointError, match="nowhere"):
        load_tokenizer(files, str(tmp_path / "nowhere"))


def test_byte_order_marks_of_files_are_not_part_of_their_text(tmp_path):
    """Regression: a tokenizer.json that began with one was not JSON, a template's came before each prompt."""
    wanted = Tokenizer.from_folder(write(tmp_path)).encode("Hello")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    (tmp_path / "template.jinja").write_bytes(b"\xef\xbb\xbf{{ messages }}")
    files = Files("hf", tmp_path, {})
    assert load_tokenizer(files).encode("Hello") == wanted
    for template in (str(tmp_path / "template.jinja"), "\ufeff{{ messages }}"):
        assert load_tokenizer(files, chat_template=template).chat_template == "{{ messages }}"
