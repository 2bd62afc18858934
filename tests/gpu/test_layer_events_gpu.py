"""Events at the ends of layers on a GPU, of eager steps and of graphs: what leaves at a layer's end is what its
step has computed."""

import random

import pytest
import torch
from msgspec.structs import replace

from shoal import SamplingParams
from shoal.kv.block_map import BlockMap
from shoal.kv.copy import CopyStream
from shoal.kv.storage import pinned_memory
from shoal.kv.view import BlockView
from tests import kv_cases, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SOME_MS = 100_000_000  # cycles
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.fixture
def engine_options():
    return {
        "dtype": "float32",
        "max_model_len": 512,
        "gpu_memory_utilization": 0.2,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 160,
        "enable_prefix_caching": False,
        "async_scheduling": False,  # no surplus decode writes to the cache
    }


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
def test_layers_that_leave_at_their_end_are_those_of_this_step(build, root, options):
    engine = build("qwen3", **options)
    runner = engine.core.ranks.runner
    [inside] = runner.cache.views()
    spec = replace(inside.spec, num_blocks=160)
    outside = BlockView.over(spec, pinned_memory(spec.num_bytes))
    block_map, copying = BlockMap(inside, outside), CopyStream(runner.device)
    for i, length in enumerate((20, 300, 20, 30, 290)):  # the cache holds another prompt's keys from then on
        prompt = random.Random(i).choices(range(256), k=length)
        copy = copying.stage(block_map, range(160), range(160))
        told = []
        runner.layer_events.listen(copy.trigger_layer)
        runner.layer_events.listen(lambda layer, event, told=told: told.append(layer))
        torch.cuda._sleep(SOME_MS)  # a copy that does not wait takes what was there before
        [output] = engine.generate([prompt], PARAMS)
        copying.synchronize()
        assert told == list(range(spec.num_layers))
        assert torch.equal(kv_cases.contents(outside), kv_cases.contents(inside))
        assert output.outputs[0].token_ids == tiny.greedy(tiny.write_model(root, "qwen3"), prompt, 1)
        engine.generate([prompt[::-1]], PARAMS)
        assert len(told) == spec.num_layers, "it listens to one step"
