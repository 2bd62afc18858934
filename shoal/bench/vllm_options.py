"""Options of `vllm bench serve` that `shoal bench serve` takes in addition to its own, with their effect."""

from __future__ import annotations

from typing import Any

from shoal.options.vllm import VllmOption

# vLLM's backends and paths -> the endpoint that they measure
BACKENDS = {
    **dict.fromkeys(("vllm", "openai", "sglang", "lmdeploy", "llama.cpp"), "completions"),
    **dict.fromkeys(("vllm-chat", "openai-chat"), "chat"),
}
PATHS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}


def _own(name: str, own: str = "", **more: Any) -> VllmOption:
    return VllmOption(name=name, own=own or name, **more)


# Where two options have one effect, the first takes precedence.
BENCH_SERVE_OPTIONS: tuple[VllmOption, ...] = (
    _own("endpoint", words=PATHS),
    _own("backend", "endpoint", words=BACKENDS),
    _own("served_model_name", "model"),
    _own("model"),
    _own("input_len", "random_input_len"),
    _own("output_len", "random_output_len"),
    VllmOption(name="tokenizer", why="prompts are token ids or words, and the server counts tokens"),
    VllmOption(name="tokenizer_mode", why="prompts are token ids or words, and the server counts tokens"),
    VllmOption(name="trust_remote_code", takes="flag", why="no tokenizer is loaded"),
    VllmOption(name="percentile_metrics", why="all latencies are shown"),
    VllmOption(name="save_detailed", takes="flag", why="--save-result writes the times of each request"),
    VllmOption(name="disable_tqdm", takes="flag", why="a bar is only shown in a terminal"),
    VllmOption(name="ready_check_timeout_sec", why="the server has to be up"),
    VllmOption(name="label", why="the result names the server and the model"),
    VllmOption(name="metadata", takes="many", why="the result names the server and the model"),
    VllmOption(
        name="goodput", takes="many", accepted=(), instead="count the times that --save-result writes"
    ),
    VllmOption(
        name="profile",
        takes="flag",
        accepted=(False,),
        instead="trace a server with POST /start_profile and /stop_profile on its admin port",
    ),
)
