"""The default model's tokenizer, from its GGUF file: transformers' ids, the published way with digits, and a
start that is not felt."""

import os
import subprocess
import sys

import pytest
import transformers
from tokenizers import pre_tokenizers

from shoal.text.tokenizer import Tokenizer, load_tokenizer
from shoal.weights.source import CheckpointFiles, resolve
from tests import texts

TEXTS = [
    "The history of the steam engine begins with the first recorded rudimentary device, described by Hero "
    "of Alexandria.",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    *texts.TEXTS,
    *texts.LESSON[:5],
]


@pytest.fixture(scope="module")
def files() -> CheckpointFiles:
    """Named by SHOAL_TEST_GGUF where there is no network."""
    return resolve(os.environ.get("SHOAL_TEST_GGUF", "smollm2"))


@pytest.fixture(scope="module")
def tokenizer(files) -> Tokenizer:
    return load_tokenizer(files)


@pytest.fixture(scope="module")
def oracle(files):
    return transformers.AutoTokenizer.from_pretrained(files.file.parent, gguf_file=files.file.name)


def test_ids_and_text_are_those_of_transformers(tokenizer, oracle):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        # transformers does not split digits from the spaces before them, see below
        if not any(c.isnumeric() for c in text):
            assert ids == oracle(text)["input_ids"], text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_digits_are_split_as_the_published_tokenizer_does(tokenizer, oracle):
    backend = oracle.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, *texts.random_texts(seed=21)]:
        assert tokenizer.encode(text) == backend.encode(text).ids, text


def test_a_conversation_is_rendered_as_transformers_does(tokenizer, oracle):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    want = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == want
    assert tokenizer.apply_chat_template(messages) == oracle(want)["input_ids"]


def test_special_tokens_are_the_files(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (
        "<|im_start|>",
        "<|im_end|>",
        2,
    )
    assert tokenizer.eos_token_ids == (2, 0)  # <|im_end|> ends a turn, <|endoftext|> a document
    assert len(tokenizer) == 49152


@pytest.mark.slow
def test_importing_and_building_it_takes_less_of_a_cold_start_than_torch_does(files):
    prepared = (
        "import time; from pathlib import Path; from shoal.weights.source import CheckpointFiles; p = "
        f"Path({str(files.file)!r}); m = CheckpointFiles(p.parent, p).metadata; t = time.perf_counter(); "
    )
    build = "from shoal.text.tokenizer import Tokenizer; Tokenizer.from_gguf(m).encode('hello'); "

    def seconds(code):
        command = [sys.executable, "-c", f"{prepared}{code}print(time.perf_counter() - t)"]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
        return min(float(done.stdout) for done in runs)

    assert seconds(build) < seconds("import torch; ")
