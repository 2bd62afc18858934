"""A rehearsal launches every variant of a kernel that captures launch after it: what is first compiled or
loaded in a capture breaks it.

In a process of its own, in which Triton does not interpret; nothing is compiled or runs: a launch only notes its variant, and torch's matmuls give zeros.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAYER = dict(
    vocab_size=999,
    hidden_size=512,
    intermediate_size=768,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
RECURRENT = dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
NO_QUERY_RANK = dict(
    num_hidden_layers=2,
    num_key_value_heads=8,
    q_lora_rank=None,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    first_k_dense_replace=2,
    num_experts_per_tok=2,
)
MODELS = {
    "dense": ("Qwen3Config", dict(num_hidden_layers=3), {}),
    "one layer": ("Qwen3Config", dict(num_hidden_layers=1), dict(max_num_seqs=1)),
    "odd heads, float16": (
        "Qwen3Config",
        dict(num_hidden_layers=2, head_dim=80, num_attention_heads=7, num_key_value_heads=1),
        dict(dtype="float16", block_size=64),
    ),
    "multipliers": ("GraniteConfig", dict(num_hidden_layers=2, residual_multiplier=0.2), {}),
    "norms behind": ("Olmo2Config", dict(num_hidden_layers=2), {}),
    "windows": ("MistralConfig", dict(num_hidden_layers=2, sliding_window=100), {}),
    "every other layer of experts": (
        "Qwen3MoeConfig",
        dict(
            num_hidden_layers=3,
            num_experts=6,
            num_experts_per_tok=2,
            decoder_sparse_step=2,
            moe_intermediate_size=64,
        ),
        {},
    ),
    "experts at the end": (
        "Qwen3MoeConfig",
        dict(
            num_hidden_layers=4,
            num_experts=16,
            num_experts_per_tok=2,
            decoder_sparse_step=2,
            # a router's product of one row
            moe_intermediate_size=64,
        ),
        dict(max_num_seqs=1),
    ),
    "latents": (
        "DeepseekV3Config",
        dict(
            num_hidden_layers=2,
            num_attention_heads=20,
            num_key_value_heads=20,
            q_lora_rank=192,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            first_k_dense_replace=2,
        ),
        {},
    ),
    "latents without a rank of queries": ("DeepseekV2Config", NO_QUERY_RANK, {}),
    "many sequences": (
        "Qwen3Config",
        dict(num_hidden_layers=2),
        dict(max_num_seqs=600, max_num_batched_tokens=9000),
    ),
    "drafts": (
        "Qwen3Config",
        dict(num_hidden_layers=2),
        dict(speculative_config={"method": "ngram", "num_speculative_tokens": 8}),
    ),
    "counted drafts": (
        "DeepseekV2Config",
        NO_QUERY_RANK,
        dict(speculative_config={"method": "suffix", "num_speculative_tokens": 3}),
    ),
    "a head's drafts": (
        "Glm4MoeConfig",
        dict(
            num_hidden_layers=2,
            first_k_dense_replace=1,
            n_routed_experts=6,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            num_nextn_predict_layers=1,
        ),
        dict(speculative_config={"method": "mtp", "num_speculative_tokens": 3}),
    ),
    "recurrent layers": ("Qwen3_5TextConfig", RECURRENT, {}),
    "a head beside recurrent layers": (
        "Qwen3_5TextConfig",
        RECURRENT,
        dict(speculative_config={"method": "mtp", "num_speculative_tokens": 3}),
    ),
    "wide, on another GPU": (
        "Qwen3Config",
        dict(num_hidden_layers=2, hidden_size=2560, num_attention_heads=32, head_dim=128),
        {},
    ),
}
WITH_HEAD = ("a head's drafts", "a head beside recurrent layers")
WITHOUT_HOPPER = ("wide, on another GPU",)


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join((str(root), str(Path(__file__).parents[1]))),
    }
    done = subprocess.run(
        [sys.executable, __file__, tmp_path_factory.mktemp("models")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
def test_captures_launch_what_was_rehearsed(name, variants):
    for rehearsed, captured in variants[name]["graphs"]:
        assert captured and set(captured) <= set(rehearsed)


@pytest.mark.parametrize("name", MODELS)
def test_steps_launch_what_the_start_has_launched(name, variants):
    """Regression: the first step with three prompts compiled kernels of recurrent layers."""
    started, launched = variants[name]["steps"]
    assert launched and set(launched) <= set(started)


@pytest.mark.parametrize("name", MODELS)
def test_what_the_start_launches_was_compiled_ahead(name, variants):
    assert set(variants[name]["steps"][0]) <= set(variants[name]["ahead"])


@pytest.mark.parametrize("name", MODELS)
def test_a_start_that_finds_its_kernels_on_disk_looks_at_few(name, variants):
    assert 0 < len(variants[name]["probed"]) < len(variants[name]["ahead"])


@pytest.mark.parametrize("name", MODELS)
def test_no_kernel_overlaps_with_what_is_before_the_embedding(name, variants):
    """kernels/pdl.py, rule 3: what was prepared before the embedding is a constant to all kernels after
    it."""
    assert variants[name]["orders"]
    for order in variants[name]["orders"]:
        overlapping = [kernel.endswith("+") for kernel in order]
        assert not any(overlapping[: order.index("_embed_kernel") + 1])
        assert any(overlapping)


@pytest.mark.parametrize("name", MODELS)
def test_decodes_follow_the_kernel_of_their_shared_prefixes_at_once(name, variants):
    """They read their queries before they wait, and count on that kernel's wait."""
    for order in variants[name]["orders"]:
        for kernel, following in itertools.pairwise(order):
            assert kernel != "prefix_kernel+" or following == "decode_kernel+"


def test_some_decodes_shared_prefixes(variants):
    assert any("prefix_kernel+" in order for order in variants["dense"]["orders"])


@pytest.mark.parametrize("name", MODELS)
def test_inputs_of_a_decodes_products_have_memory_for_all_rows_that_tiles_read(name, variants):
    """Else the copy engine fills in zeros, which is slow (kernels/hopper.py)."""
    inputs = variants[name]["inputs"]
    assert inputs or name in (*WITHOUT_HOPPER, "one layer", "experts at the end")
    # A head's inputs come from torch's `cat` and row selection, whose results lack these rows.
    assert all(described == read for described, read in inputs) or name in WITH_HEAD


def launched_variants(folder: Path, name: str) -> dict:
    from contextlib import contextmanager, nullcontext
    from types import SimpleNamespace

    import torch
    import transformers
    import triton
    from triton.runtime.jit import JITFunction
    from triton_compile import _NoDriver

    from shoal.attention.latent_triton import TritonLatentBackend
    from shoal.attention.triton import TritonBackend
    from shoal.engine import build_model as build_module
    from shoal.engine.drafting import device as drafting_device
    from shoal.engine.drafting import step_sizes
    from shoal.engine.runner import graphs as graphs_module
    from shoal.engine.runner import runner as runner_module
    from shoal.engine.runner import start_up
    from shoal.engine.runner import steps as steps_module
    from shoal.engine.runner.graphs import DecodeGraphs, StepGraphs
    from shoal.engine.runner.steps import Steps
    from shoal.kernels import triton_ops
    from shoal.kernels.matmul import dispatch, hopper_linear
    from shoal.kinds.latent import LatentKind
    from tests import tiny
    from tests.cpu.engine.test_runner import Rank

    gc.freeze()  # collections leave out what was imported, and the models so far
    small = dispatch.Limits(pipeline_side=32)  # these models are small
    gpu = dispatch.GPU(132, name not in WITHOUT_HOPPER, small)
    dispatch.gpu_of = lambda _: gpu
    seen: list[str] = []
    graphs = []
    triton.runtime.driver.set_active(_NoDriver())
    # Launches end where Triton would compile; what it prepares for the compiler takes most of their time.
    JITFunction._pack_args = lambda self, backend, kwargs, bound, specialization, options: (
        options,
        *[{}] * 3,
    )
    JITFunction._do_compile = lambda self, key, *_: seen.append(f"{self.__name__} {key}")

    def take() -> list[str]:
        taken = sorted(set(seen))
        seen.clear()
        return taken

    orders: list[list[str]] = []  # the kernels of each step as they were launched; "+": it may overlap
    inputs: list[tuple[int, int]] = []  # rows in the TMA descriptor, and rows read, of a decode's matmuls
    noting: list[str] = []  # the kind of step that is launched now, if any
    run, describe, launch_step = JITFunction.run, hopper_linear.descriptor, Steps.launch

    @contextmanager
    def step(kind: str):
        orders.append([])
        noting.append(kind)
        yield
        noting.clear()

    def noting_run(self, *args, **options):
        if noting:
            orders[-1].append(self.__name__ + "+" * options.get("launch_pdl", False))
        return run(self, *args, **options)

    def noting_describe(matrix, rows, columns, rows_read=0):
        described = describe(matrix, rows, columns, rows_read)
        if noting == ["captured decode"] and rows_read > matrix.shape[0]:
            inputs.append((described.shape[0], rows_read))
        return described

    def noting_launch(self, *args):
        with step("eager"):
            return launch_step(self, *args)

    JITFunction.run, hopper_linear.descriptor, Steps.launch = noting_run, noting_describe, noting_launch

    def capture(self, pool) -> None:
        take()
        with self.rehearsal():
            for key in self.keys:
                self.launch(key)
        rehearsed = take()
        for key in self.keys:
            if isinstance(key, int):  # whole rows: a graph without a model
                self.launch(key)
                continue
            with step("captured decode" if isinstance(self, DecodeGraphs) else "captured mixed"):
                self.launch(key)
        graphs.append((rehearsed, take()))

    # In bf16 they take minutes on a processor that has no instructions for it.
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
    torch.Tensor.addmm_ = lambda self, *_, **__: self
    StepGraphs.capture = capture
    graphs_module.on_capture_stream = nullcontext
    torch.cuda.graph_pool_handle = torch.cuda.synchronize = lambda: None
    start_up.compiling_ahead = lambda: nullcontext(["a kernel that was not on disk"])
    runner_module.select_ops = lambda _: triton_ops
    build_module.select_backends = lambda config, device, dtype, shapes, holding: {
        shape: TritonLatentBackend(shape, device, dtype)
        if isinstance(shape, LatentKind)
        else TritonBackend(
            *(shape, config.block_size, config.max_num_seqs, config.max_model_len, device, dtype),
            queries=config.queries,
        )
        for shape in shapes
    }
    sizes_of = step_sizes.draft_sizes

    def sizes_on_gpu(config):
        names = "speculative", "max_num_seqs", "max_num_batched_tokens"
        return sizes_of(SimpleNamespace(device="cuda", **{name: getattr(config, name) for name in names}))

    step_sizes.draft_sizes = drafting_device.draft_sizes = sizes_on_gpu
    drafting_device.OPS["cpu"] = drafting_device.OPS["cuda"]
    # Nothing accepts drafts.
    steps_module.read_reports = lambda report: ([[0]] * len(report), ())
    torch.mm = lambda x, weight: x.new_zeros(len(x), weight.shape[1])
    kind, changes, options = MODELS[name]
    model = getattr(transformers, kind)(
        **LAYER | changes,
        architectures=[kind.replace("TextConfig", "Config").replace("Config", "ForCausalLM")],
    )
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    rank = Rank(
        folder,
        num_blocks=2000,
        **dict(dtype="bfloat16", max_num_seqs=48, max_num_batched_tokens=320) | options,
        load_format="dummy",
        max_model_len=1024,
    )
    runner = rank.runner
    take()
    num_blocks = len(runner.cache.blocks)
    runner.cache.allocate(1)
    start_up.compile_ahead(runner)
    ahead = take()
    start_up.compiling_ahead = lambda: nullcontext([])
    start_up.compile_ahead(runner)
    probed = take()
    runner.cache.allocate(num_blocks)
    with torch.inference_mode():
        start_up.prepare_steps(runner)
    started = [*(variant for pair in graphs for variants in pair for variant in variants), *take()]
    runner.drop_graphs()  # eager steps, but none of fewer tokens than are ever captured
    rank.builder.mixed_shapes = ()
    several = [[i] * n for i, n in enumerate((40, 300, 600, 33, *[20] * 9))]
    # a step that ends three prompts
    three = [[20 + i] * (100 + i) for i in range(3)]
    # thousands of short requests in small: most steps hold many decodes and many prompts
    short = [
        [i] * (8 + i % 33) for i in range(2 * rank.config.max_num_seqs if name == "many sequences" else 0)
    ]
    for prompts in (several, three, short):
        for i, prompt in enumerate(prompts):
            penalty = 1.1 if i % 3 == 2 else 1.0  # some rows are drawn again, in chunks of a few sizes
            rank.add(prompt, temperature=1.0, max_tokens=4 + i % 9, repetition_penalty=penalty)
        rank.run()
    return {
        "graphs": graphs,
        "steps": (started, take()),
        "ahead": ahead,
        "probed": probed,
        "orders": orders,
        "inputs": inputs,
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {name: launched_variants(Path(sys.argv[1]) / str(i), name) for i, name in enumerate(MODELS)}
        )
    )
