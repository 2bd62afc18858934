"""Names of models on the Hugging Face hub: org/name, org/name:Q4_K_M, hf.co/org/name, and names of Ollama's
library, which stand for repositories of GGUF files there. hub.py asks the hub."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from shoal.config import DEFAULT_MODEL

NAME = re.compile(
    r"(?P<host>(?:https://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)?(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?::(?P<tag>[\w.-]+)|/(?:tree|blob)/main(?:/(?P<file>[\w./-]+\.gguf))?)?/?"
)
LIBRARY_NAME = re.compile(r"(?P<model>[a-z][\w.-]*)(?::(?P<tag>[\w.-]+))?")
LIBRARY_TAG = re.compile(
    r"(?P<size>(?:e?[\d.]+[bm]|micro|tiny|small)(?:-h)?)(?:-a\d+b)?(?:-instruct|-it)?"
    r"(?:-(?P<tag>(?:i?q\d|b?f)\w+))?",
    re.IGNORECASE,
)
NEWEST = "latest"
# Ollama's name of a model -> its sizes, the usual one first -> a repository with GGUF files of it.
LIBRARY = {
    "deepseek-r1": {
        "8b": "unsloth/DeepSeek-R1-0528-Qwen3-8B-GGUF",
        "1.5b": "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF",
        "7b": "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF",
        "14b": "bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF",
        "32b": "bartowski/DeepSeek-R1-Distill-Qwen-32B-GGUF",
        "70b": "bartowski/DeepSeek-R1-Distill-Llama-70B-GGUF",
    },
    "gemma2": {size: f"bartowski/gemma-2-{size}-it-GGUF" for size in ("9b", "2b", "27b")},
    "gemma3": {size: f"unsloth/gemma-3-{size}-it-GGUF" for size in ("4b", "270m", "1b", "12b", "27b")},
    "gemma4": {
        "e4b": "unsloth/gemma-4-E4B-it-GGUF",
        "e2b": "unsloth/gemma-4-E2B-it-GGUF",
        "12b": "unsloth/gemma-4-12b-it-GGUF",
        "26b": "unsloth/gemma-4-26B-A4B-it-GGUF",
        "31b": "unsloth/gemma-4-31B-it-GGUF",
    },
    "gpt-oss": {"20b": "ggml-org/gpt-oss-20b-GGUF"},
    "granite3.3": {
        "8b": "ibm-granite/granite-3.3-8b-instruct-GGUF",
        "2b": "ibm-granite/granite-3.3-2b-instruct-GGUF",
    },
    "granite4": {
        "micro": "ibm-granite/granite-4.0-micro-GGUF",
        **{
            f"{size}-h": f"ibm-granite/granite-4.0-h-{size}-GGUF"
            for size in ("tiny", "small", "micro", "350m", "1b")
        },
    },
    "lfm2.5-thinking": {"1.2b": "LiquidAI/LFM2.5-1.2B-Thinking-GGUF"},
    "llama3": {"8b": "bartowski/Meta-Llama-3-8B-Instruct-GGUF"},
    "llama3.1": {
        "8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        "70b": "bartowski/Meta-Llama-3.1-70B-Instruct-GGUF",
    },
    "llama3.2": {"3b": "bartowski/Llama-3.2-3B-Instruct-GGUF", "1b": "bartowski/Llama-3.2-1B-Instruct-GGUF"},
    "llama3.3": {"70b": "bartowski/Llama-3.3-70B-Instruct-GGUF"},
    "mistral": {"7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF"},
    "mistral-nemo": {"12b": "bartowski/Mistral-Nemo-Instruct-2407-GGUF"},
    "mistral-small": {"24b": "bartowski/Mistral-Small-24B-Instruct-2501-GGUF"},
    "nemotron-3-nano": {
        "30b": "unsloth/Nemotron-3-Nano-30B-A3B-GGUF",
        "4b": "unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF",
    },
    "olmo2": {"7b": "allenai/OLMo-2-1124-7B-Instruct-GGUF", "13b": "allenai/OLMo-2-1124-13B-Instruct-GGUF"},
    "phi4": {"14b": "bartowski/phi-4-GGUF"},
    "phi4-mini": {"3.8b": "bartowski/microsoft_Phi-4-mini-instruct-GGUF"},
    "qwen2.5": {
        size.lower(): f"bartowski/Qwen2.5-{size}-Instruct-GGUF"
        for size in ("7B", "0.5B", "1.5B", "3B", "14B", "32B", "72B")
    },
    "qwen2.5-coder": {
        size.lower(): f"bartowski/Qwen2.5-Coder-{size}-Instruct-GGUF"
        for size in ("7B", "0.5B", "1.5B", "3B", "14B", "32B")
    },
    "qwen3": {
        **{size.lower(): f"Qwen/Qwen3-{size}-GGUF" for size in ("8B", "0.6B", "1.7B", "4B", "14B", "32B")},
        "30b": "Qwen/Qwen3-30B-A3B-GGUF",
    },
    "qwen3-coder": {"30b": "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF"},
    "qwen3-next": {"80b": "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF"},
    "qwen3.5": {
        **{size.lower(): f"unsloth/Qwen3.5-{size}-GGUF" for size in ("9B", "0.8B", "2B", "4B", "27B")},
        "35b": "unsloth/Qwen3.5-35B-A3B-GGUF",
        "122b": "unsloth/Qwen3.5-122B-A10B-GGUF",
    },
    "qwen3.6": {"35b": "unsloth/Qwen3.6-35B-A3B-GGUF", "27b": "unsloth/Qwen3.6-27B-GGUF"},
    "smollm2": {
        "1.7b": "bartowski/SmolLM2-1.7B-Instruct-GGUF",
        "360m": "bartowski/SmolLM2-360M-Instruct-GGUF",
        "135m": "bartowski/SmolLM2-135M-Instruct-GGUF",
    },
    "tinyllama": {"1.1b": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF"},
}


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository and a choice among its GGUF files: `tag` is a quantization or the name of a file. None:
    its safetensors, or the usual one of its GGUF files."""

    repo: str
    tag: str | None = None

    def __str__(self) -> str:
        return self.repo if self.tag is None else f"{self.repo}:{self.tag}"


def hub_model(name: str) -> HubModel | None:
    """Parses the name of a model on the hub; None for any other name. Relative paths, paths from a home
    folder and paths to a file have one slash as well."""
    match = NAME.fullmatch(name)
    if match is None:
        return _of_library(name)
    repo, tag = match["repo"], match["file"] or match["tag"]
    is_path = match["host"] is None and (name.startswith(".") or (tag is None and name.endswith(".gguf")))
    if is_path or repo.startswith(("hf.co/", "huggingface.co/")):
        return None
    return HubModel(repo, None if tag == NEWEST else tag)


def _of_library(name: str) -> HubModel | None:
    match = LIBRARY_NAME.fullmatch(name.lower())
    sizes = LIBRARY.get(match["model"]) if match is not None else None
    if match is None or sizes is None or match[0] == DEFAULT_MODEL:
        return None
    if match["tag"] in (None, NEWEST):
        return HubModel(next(iter(sizes.values())))
    tag = LIBRARY_TAG.fullmatch(match["tag"])
    if tag is None or tag["size"] not in sizes:
        return None
    return HubModel(sizes[tag["size"]], tag["tag"].upper().replace("FP", "F") if tag["tag"] else None)


def library_hint(name: str) -> str | None:
    """Returns the end of an error about `name`, which may be a misspelt name of Ollama's library or of the
    default model; None for a path."""
    match = LIBRARY_NAME.fullmatch(name.lower())
    if match is None or name.endswith(".gguf"):
        return None
    if match["tag"] is not None and (sizes := LIBRARY.get(match["model"])):
        return f"choose one of {', '.join(match['model'] + ':' + size for size in sizes)}"
    if nearest := difflib.get_close_matches(match["model"], LIBRARY, n=1, cutoff=0.8):
        return f"did you mean {nearest[0]!r}?"
    return (
        f"of Ollama's names, Shoal knows {', '.join(LIBRARY)}; name another model by its id on the hub "
        "(org/name, org/name:Q4_K_M), or a folder, a .gguf file or a URL"
    )
