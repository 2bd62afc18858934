"""An engine that runs does not see torch's default type, which another engine's start in the same process sets."""

import ast
from pathlib import Path

import pytest
import torch

from shoal import LLM, SamplingParams, kernels
from shoal.layers import cpu_layers
from tests.tiny_families import write_family

MAKERS = {"torch.empty", "torch.zeros", "torch.ones", "torch.full", "torch.rand", "torch.randn", "torch.eye"}
ENGINES = {"mixtral": {"quantization": "fp8"}, "kimi-linear": {}, "granite4-mamba": {}, "lfm2": {}}


@pytest.mark.parametrize("name", ENGINES)
def test_a_start_in_another_type_changes_nothing_in_a_running_engine(name, tmp_path):
    """Regression: what a step allocated had the default type. While an engine in bfloat16 started, fp8 answered
    wrongly, and recurrent layers ended the engine."""
    sampling = [
        SamplingParams(max_tokens=6, temperature=heat, seed=7, logprobs=2, detokenize=False)
        for heat in (0.0, 0.8)
    ]
    llm = LLM(
        str(write_family(tmp_path, name)),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 24,
        **ENGINES[name],
    )

    def answers():
        llm.reset_prefix_cache()
        outputs = llm.generate([[5, 6, 7, 8, 9] * 4, [3, 4]], sampling, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    expected = answers()
    try:
        # Memory in float64 is large enough for float32, so the test fails in order.
        torch.set_default_dtype(torch.float64)
        assert answers() == expected
    finally:
        torch.set_default_dtype(torch.float32)
        llm.exit()


def test_kernels_name_the_type_of_memory():
    """Regression: while an engine in bfloat16 started, fused layers wrote beyond memory for half of their numbers."""
    [folder] = kernels.__path__
    paths = [*Path(folder).rglob("*.py"), Path(cpu_layers.__file__)]
    calls = [
        node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    made = [call for call in calls if ast.unparse(call.func) in MAKERS]
    assert len(made) > 50
    assert not [ast.unparse(call) for call in made if "dtype" not in {word.arg for word in call.keywords}]
