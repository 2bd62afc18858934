"""Counts the lines of code that a reader must know to follow one token of Qwen3 through the engine: lines that
hold a token of Python other than comments and docstrings. `python -m tests.cpu.core_size` prints them.

Left out are kernels; the parts that an engine may lack (tiers, peers, grammars, exports, costs of steps),
which only listen to the core; what reads a checkpoint and its config; what a rank does before its first step; and
how several ranks are called. Of the two attention backends the GPU's is counted.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

LIMIT = 4000  # a reader's afternoon
ROOT = Path(__file__).parents[2] / "shoal"

# what a stop of the token is about -> its files
STOPS: dict[str, tuple[str, ...]] = {
    "core and step loop": (
        "engine/core.py",
        "engine/pause_state.py",
        "engine/step_loop.py",
        "engine/step_outputs.py",
        "engine/step_part.py",
    ),
    "scheduling": (
        "engine/scheduling/policy.py",
        "engine/scheduling/scheduler.py",
        "engine/scheduling/sequence.py",
        "engine/scheduling/sequence_blocks.py",
    ),
    "blocks": ("kv/blocks.py",),
    "batch": (
        "attention/step_input.py",
        "engine/runner/batch.py",
        "engine/runner/batch_state.py",
        "engine/runner/packed_step.py",
        "engine/runner/step_buffers.py",
    ),
    "runner": (
        "engine/runner/graphs.py",
        "engine/runner/kv_cache.py",
        "engine/runner/runner.py",
        "engine/runner/sampling.py",
        "engine/runner/steps.py",
    ),
    "model": (
        "model_config.py",
        "kinds/rope.py",
        "models/decoder.py",
        "models/decoder_layers/decoder_layer.py",
        "models/families/qwen3.py",
        "models/rope.py",
    ),
    "layers": (
        "layers/attention.py",
        "layers/embedding.py",
        "layers/layer_step.py",
        "layers/linear.py",
        "layers/matrix.py",
        "layers/mlp.py",
        "layers/norm.py",
        "layers/parallel.py",
        "layers/weight_format.py",
    ),
    "attention": (
        "attention/backend.py",
        "attention/select.py",
        "attention/splits.py",
        "attention/triton.py",
    ),
}


def code_lines(path: Path) -> int:
    """Returns the number of a file's lines with code."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*empty, tokenize.ENDMARKER, tokenize.ENCODING):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def counted() -> dict[str, dict[str, int]]:
    """Returns the lines of code of each file, stop by stop."""
    return {stop: {name: code_lines(ROOT / name) for name in names} for stop, names in STOPS.items()}


def main() -> None:
    total = 0
    for stop, files in counted().items():
        print(f"{sum(files.values()):6} {stop}")
        total += sum(files.values())
        if "-v" in sys.argv:
            for name, lines in files.items():
                print(f"{lines:14} {name}")
    print(f"{total:6} in all")


if __name__ == "__main__":
    main()
