"""A start imports what its first token needs, and nothing else: each library costs every start its time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import tiny

# What torch imports by itself is not Shoal's to choose, so only what comes after it is looked at.
LIBRARIES = {"llguidance", "msgspec", "safetensors", "tokenizers", "tqdm", "xxhash", "zmq"}
FIRST_TOKEN = """
import json, sys
import torch
SLOW = {"sympy", "torch._dynamo", "torch._inductor", "triton"}
before = set(sys.modules)
from shoal import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
with_files = {name for name, module in sys.modules.items() if getattr(module, "__file__", None)}
new = {name for name in with_files - before if not name.startswith("torch.")}
print(json.dumps(sorted({name.partition(".")[0] for name in new} | SLOW & set(sys.modules))))
"""


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["plain", "fp8"])
def test_the_first_token_imports_few_libraries(tmp_path, options):
    """Regression: quantized weights were moved off the meta device by a function that imports all of sympy,
    which took 0.3 to 1.5 s."""
    folder = tiny.write_model(tmp_path, "qwen3")
    command = [sys.executable, "-c", FIRST_TOKEN, str(folder), json.dumps({"device": "cpu"} | options)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(json.loads(done.stdout.splitlines()[-1])) - {"shoal"} - sys.stdlib_module_names
    assert {name for name in imported if not name.startswith("_cython")} <= LIBRARIES


OPENING = """
import sys
from shoal.engine import llm
llm.open_device_early = lambda device: sys.exit("torch came first" if "torch" in sys.modules else 0)
llm.LLM("a model", device="cpu")
sys.exit("the GPU is not opened early")
"""


def test_a_start_opens_the_gpu_before_it_imports_torch():
    done = subprocess.run([sys.executable, "-c", OPENING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
