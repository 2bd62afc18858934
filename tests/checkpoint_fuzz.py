"""Damages checkpoints, byte by byte and field by field, and opens what comes of it as an engine would.

    python -m tests.checkpoint_fuzz FOLDER --seed 1 --cases 1000

FOLDER holds `hf`, `bytes.gguf` and `pieces.gguf`, all whole; it is made if it is not there. Each case follows
from seed and number alone. A case must end as a checkpoint or as a UserError that names a file, in bounded
time and memory: the process that tries them has a limit on its address space, and a watchdog that ends it.
What happened is printed as JSON.
"""

from __future__ import annotations

import argparse
import collections
import copy
import faulthandler
import json
import math
import random
import resource
import shutil
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

KINDS = ("gguf", "safetensors", "config", "tokenizer")
CASE_S = 20.0  # until a watchdog ends a case: a hang lasts longer even on a busy machine
MORE_BYTES = 3 << 30  # address space beyond that of an idle process
INTEGERS = [
    0,
    1,
    -1,
    2,
    3,
    5,
    7,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    10**400,
]
VALUES = [
    None,
    True,
    False,
    *INTEGERS,
    0.5,
    -0.5,
    1e-308,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "text",
    "7",
    "../../etc/passwd",
    "/dev/zero",
    "a\0b",
    "\ud800",
    "{}",
    "{0.__class__}",
    "\x1b[2J",
    [],
    {},
    [[]],
    [None],
    [1, "a"],
    {"a": 1},
    ["x"] * 1000,
]
HUGE = ["x" * 200_000, list(range(20_000)), {str(i): [] for i in range(5_000)}]


# GGUF as a tree

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Gguf:
    """Fields of a GGUF file, and a test may falsify each."""

    def __init__(self, metadata: dict[str, Any], tensors: list[dict[str, Any]], data: bytes) -> None:
        self.version, self.metadata, self.tensors, self.data = (
            3,
            [[k, *typed(v)] for k, v in metadata.items()],
            tensors,
            data,
        )
        self.num_tensors: int | None = None
        self.num_values: int | None = None
        self.lies: dict[int, int] = {}  # the nth length or count that is written -> another
        self.alignment = 32

    def pack(self) -> bytes:
        self.counts = 0
        head = b"GGUF" + struct.pack("<I", self.version & 0xFFFFFFFF)
        head += u64(len(self.tensors) if self.num_tensors is None else self.num_tensors)
        head += u64(len(self.metadata) if self.num_values is None else self.num_values)
        for key, kind, value in self.metadata:
            head += self._text(key) + struct.pack("<I", kind) + self._value(kind, value)
        for t in self.tensors:
            head += self._text(t["name"]) + struct.pack("<I", t.get("num_dims", len(t["dims"])) & 0xFFFFFFFF)
            head += (
                b"".join(map(u64, t["dims"])) + struct.pack("<I", t["type"] & 0xFFFFFFFF) + u64(t["offset"])
            )
        return head + bytes(-len(head) % self.alignment) + self.data

    def _count(self, number: int) -> bytes:
        self.counts += 1
        return u64(self.lies.get(self.counts, number))

    def _text(self, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        return self._count(len(data)) + data

    def _value(self, kind: int, value: Any) -> bytes:
        if kind == STRING:
            return self._text(value)
        if kind == ARRAY:
            element, values = value
            return (
                struct.pack("<I", element)
                + self._count(len(values))
                + b"".join(self._value(element, v) for v in values)
            )
        return struct.pack("<" + SCALARS.get(kind, "Q"), value)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number % 2**64)


def typed(value: Any) -> tuple[int, Any]:
    """(type, value) as a GGUF file could hold it."""
    if isinstance(value, bool):
        return 7, value
    if isinstance(value, int):
        return (
            (10, value)
            if 0 <= value < 2**64
            else (11, value)
            if -(2**63) <= value < 0
            else (STRING, str(value))
        )
    if isinstance(value, float):
        return 12, value
    if isinstance(value, list):
        kinds = [typed(v)[0] for v in value] or [4]
        kind = max(set(kinds), key=kinds.count)
        return ARRAY, (kind, [typed(v)[1] for v, k in zip(value, kinds) if k == kind])
    return STRING, value if isinstance(value, str) else json.dumps(value)


def write_whole(folder: Path) -> None:
    """The two checkpoints that are damaged."""
    from shoal.weights.gguf.header import read_header
    from tests import texts, tiny
    from tests.cpu.weights.test_weights_gguf import write_gguf

    tiny.write_model(folder, "qwen3-moe")
    (folder / "qwen3-moe").rename(folder / "hf")
    (folder / "hf" / "complete").unlink()
    (folder / "hf" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [257], "temperature": 0.5, "top_k": 20})
    )
    write_gguf(folder / "plain.gguf", "llama", "Q8_0")
    header, content = read_header(folder / "plain.gguf"), (folder / "plain.gguf").read_bytes()
    start = min(info.offset for info in header.tensors.values())
    tensors = [
        {
            "name": info.name,
            "dims": list(info.shape[::-1]),
            "type": {"F32": 0, "Q8_0": 8}[info.kind],
            "offset": info.offset - start,
        }
        for info in header.tensors.values()
    ]
    for name, tokenizer in (
        ("bytes", texts.byte_level_metadata("llama-bpe", control=("<|end_of_text|>",))),
        ("pieces", texts.sentencepiece_metadata()),
    ):
        tree = Gguf(
            header.metadata | tokenizer | {"tokenizer.chat_template": "{{ messages }}"},
            tensors,
            content[start:],
        )
        (folder / f"{name}.gguf").write_bytes(tree.pack())
    (folder / "plain.gguf").unlink()


def parse(path: Path) -> Gguf:
    from shoal.kernels.quant.ggml_types import TYPES
    from shoal.weights.gguf.header import read_header

    header, content = read_header(path), path.read_bytes()
    start = min(info.offset for info in header.tensors.values())
    number = {kind: n for n, (kind, *_) in TYPES.items()}
    return Gguf(
        header.metadata,
        [
            {
                "name": info.name,
                "dims": list(info.shape[::-1]),
                "type": number[info.kind],
                "offset": info.offset - start,
            }
            for info in header.tensors.values()
        ],
        content[start:],
    )


# Damage


def damage_bytes(r: random.Random, content: bytes, head: int) -> bytes:
    """A few changes, most of them in the first `head` bytes."""
    out = bytearray(content)
    for _ in range(r.choice((1, 1, 1, 2, 5))):
        at = r.randrange(max(1, min(len(out), head if r.random() < 0.9 else len(out))))
        kind = r.randrange(6)
        if kind == 0:
            del out[at:]
        elif kind == 1:
            out[at : at + 1] = bytes([(out[at] if at < len(out) else 0) ^ (1 << r.randrange(8))])
        elif kind == 2:
            out[at : at + 8] = u64(r.choice(INTEGERS))
        elif kind == 3:
            out[at : at + r.randint(1, 64)] = b""
        elif kind == 4:
            out[at:at] = r.randbytes(r.randint(1, 64))
        else:
            piece = out[at : at + r.randint(1, 200)]
            to = r.randrange(max(1, min(len(out), head)))
            out[to : to + len(piece)] = piece
    return bytes(out)


def damage_gguf(r: random.Random, tree: Gguf) -> bytes:
    for _ in range(r.choice((1, 1, 2, 3))):
        kind = r.randrange(12)
        tensor = r.choice(tree.tensors)
        entry = r.choice(tree.metadata)
        if kind <= 2:
            entry[1:] = typed(r.choice(VALUES + HUGE))
        elif kind == 3:
            tree.metadata.remove(entry)
        elif kind == 4:
            tree.metadata.append(list(entry))
        elif kind == 5:
            depth, value = r.choice((1, 3, 6, 300)), (4, [1])
            for _ in range(depth):
                value = (ARRAY, [value])
            entry[1:] = [ARRAY, value]
        elif kind == 6:
            tensor["dims"] = r.choice(
                (
                    [],
                    [0],
                    [1] * 5,
                    [2**63] * 4,
                    [1] * 100_000,
                    [r.choice(INTEGERS)],
                    tensor["dims"][::-1],
                    [*tensor["dims"], 1],
                    [d * r.choice((0, 2, 2**31)) for d in tensor["dims"]],
                )
            )
        elif kind == 7:
            tensor["num_dims"] = r.choice(INTEGERS)
        elif kind == 8:
            tensor["offset"] = r.choice([*INTEGERS, 32, 64, tensor["offset"] + 1, tensor["offset"] + 32])
        elif kind == 9:
            tensor["type"] = r.choice((0, 1, 2, 3, 8, 12, 14, 30, 31, 2**31))
        elif kind == 10:
            other = r.choice(tree.tensors)["name"]
            tensor["name"] = r.choice(
                (
                    other,
                    "",
                    "blk.0.ffn_up.{0.__class__}",
                    "blk.99999999999999999999.ffn_up.weight",
                    "x" * 100_000,
                    "rope_freqs.weight",
                    "output.bias",
                    "blk.0.ffn_up_exps.weight",
                    "\x1b[2J.weight",
                )
            )
        else:
            which = r.randrange(4)
            if which == 0:
                tree.num_tensors = r.choice(INTEGERS)
            elif which == 1:
                tree.num_values = r.choice(INTEGERS)
            else:
                tree.lies[r.randint(1, len(tree.metadata) * 2 + len(tree.tensors))] = r.choice(INTEGERS)
    return tree.pack()


def damage_json(r: random.Random, value: Any) -> bytes:
    """Changes fields anywhere in the tree; now and then its text."""
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        at = value
        while isinstance(at, (dict, list)) and at:
            key = r.choice(list(at)) if isinstance(at, dict) else r.randrange(len(at))
            if not isinstance(at[key], (dict, list)) or not at[key] or r.random() < 0.3:
                break
            at = at[key]
        if not isinstance(at, (dict, list)) or not at:
            continue
        kind = r.randrange(8)
        if kind <= 3:
            at[key] = copy.deepcopy(r.choice(VALUES))
        elif kind == 4:
            at[key] = copy.deepcopy(r.choice(HUGE))
        elif kind == 5:
            del at[key]
        elif kind == 6:
            at[key] = "@deep@"
        elif isinstance(at, dict):
            at[str(r.choice(VALUES))] = at[key]
        else:
            at.append(at[key])
    text = json.dumps(value)
    depth = r.choice((3, 200, 100_000))
    text = text.replace(
        '"@deep@"', "[" * depth + "]" * depth if r.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth
    )
    data = text.encode("utf-8", "surrogatepass")
    return damage_bytes(r, data, len(data)) if r.random() < 0.15 else data


def damage_safetensors(r: random.Random, content: bytes) -> bytes:
    if r.random() < 0.3:
        return damage_bytes(r, content, 4000)
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(r.choice((1, 1, 2))):
        info, kind = header[r.choice(names)], r.randrange(8)
        if not isinstance(info, dict):
            continue
        if kind == 0:
            info["dtype"] = r.choice(
                ["F64", "F16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", None, 3, [], "\ud800"]
            )
        elif kind == 1:
            info["shape"] = r.choice(
                [[], [0], [1] * 100_000, [-1], [2**63], [2**32, 2**32], None, [1.5], "x", [True], [[1]]]
            )
        elif kind == 2:
            info["data_offsets"] = [r.choice(INTEGERS), r.choice(INTEGERS)]
        elif kind == 3:
            info["data_offsets"] = list(header[r.choice(names)].get("data_offsets", []))
        elif kind == 4:
            info.pop(r.choice(list(info)), None)
        elif kind == 5:
            header[r.choice(["", "x", "\ud800", "model.norm.weight", "\x1b[2J"])] = copy.deepcopy(info)
        elif kind == 6:
            return content[: 8 + length] + content[8 + length :][: r.randrange(len(content))]
        else:
            header["__metadata__"] = r.choice(VALUES)
    data = damage_json(r, header) if r.random() < 0.2 else json.dumps(header).encode("utf-8", "surrogatepass")
    return u64(r.choice(INTEGERS) if r.random() < 0.1 else len(data)) + data + content[8 + length :]


def write_case(kind: str, r: random.Random, whole: Path, into: Path) -> Path:
    """Writes the damaged checkpoint; returns what a user would name."""
    if kind == "gguf":
        path = into / "model.gguf"
        source = whole / r.choice(("bytes.gguf", "pieces.gguf"))
        content = source.read_bytes()
        path.write_bytes(
            damage_bytes(r, content, 40_000) if r.random() < 0.3 else damage_gguf(r, parse(source))
        )
        return path
    folder = into / "hf"
    shutil.copytree(whole / "hf", folder, dirs_exist_ok=True)
    if kind == "safetensors":
        file = folder / "model.safetensors"
        if r.random() < 0.25:
            names = [
                n
                for n in json.loads(file.read_bytes()[8 : 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]])
                if n != "__metadata__"
            ]
            index = {"metadata": {}, "weight_map": {name: file.name for name in names}}
            (folder / "model.safetensors.index.json").write_bytes(damage_json(r, index))
        else:
            file.write_bytes(damage_safetensors(r, file.read_bytes()))
    else:
        names = {
            "config": ("config.json", "config.json", "generation_config.json"),
            "tokenizer": ("tokenizer.json", "tokenizer.json", "tokenizer_config.json"),
        }[kind]
        file = folder / r.choice(names)
        if kind == "config" and r.random() < 0.3:
            content = json.loads(file.read_text())
            content["rope_scaling"] = {
                "rope_type": r.choice(["yarn", "llama3", "linear", 3]),
                "factor": r.choice(VALUES),
                "original_max_position_embeddings": r.choice(VALUES),
                "low_freq_factor": r.choice([1.0, *VALUES]),
                "high_freq_factor": 4.0,
                "beta_fast": r.choice(VALUES),
                "rope_theta": r.choice([10.0, *VALUES]),
            }
            file.write_text(json.dumps(content))
        file.write_bytes(damage_json(r, json.loads(file.read_text())))
    return folder


# What is tried


def open_checkpoint(path: Path, load: bool) -> None:
    """All that an engine reads before it builds anything; with `load` the engine too, and a few of its
    tokens."""
    import numpy as np

    from shoal.config import EngineConfig
    from shoal.engine.resolve import resolve_config
    from shoal.models.rope import rope_frequencies
    from shoal.text.tokenizer import load_tokenizer
    from shoal.weights.loader import check_shapes
    from shoal.weights.source import resolve

    files = resolve(str(path))
    config = files.config
    tokenizer = load_tokenizer(files)
    assert all(i >= 0 for i in files.eos_token_ids) and isinstance(files.generation_config, dict)
    frequencies, factor = rope_frequencies(
        config.attention.rope, config.attention.rotary_dim, config.max_position_embeddings
    )
    assert np.isfinite(frequencies).all() and math.isfinite(factor)
    quantized_bytes = files.quantized_bytes
    resolved = resolve_config(EngineConfig(device="cpu", load_format="dummy"), config, quantized_bytes)
    check_shapes(files)
    tokenizer.decode(tokenizer.encode("Hello, world! 123"))
    length = min(64, resolved.max_model_len)  # this program's own choices must fit what the checkpoint says
    if load and length > 1:
        from shoal import LLM, SamplingParams

        with LLM(str(path), device="cpu", kv_cache_memory_bytes=8 << 20, max_model_len=length) as llm:
            llm.generate([[1, 2, 3][: length - 1]], SamplingParams(max_tokens=2), use_tqdm=False)


def run(whole: Path, seed: int, first: int, cases: int, load: bool) -> dict[str, Any]:
    from shoal.errors import UserError

    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("bytes.gguf", "pieces.gguf", "hf"):
            # what is whole is taken; and all is imported before memory is counted
            open_checkpoint(whole / name, load)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, resource.RLIM_INFINITY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, first + cases):
            kind = KINDS[number % len(KINDS)]
            r = random.Random(f"{seed}-{number}")
            into = Path(temporary) / "case"
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir()
            path = write_case(kind, r, whole, into)
            print(f"case {number} {kind}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(CASE_S, exit=True)
            try:
                open_checkpoint(path, load)
                counts[f"{kind} taken"] += 1
            except UserError as error:
                counts[f"{kind} refused"] += 1
                message = str(error)
                if not message.isprintable() or str(into) not in message:
                    failures.append(
                        {"case": number, "kind": kind, "error": f"a poor message: {message[:500]}"}
                    )
            except BaseException as error:  # noqa: BLE001 - it is what is looked for
                failures.append(
                    {
                        "case": number,
                        "kind": kind,
                        "error": f"{type(error).__name__}: {str(error)[:300]!r}",
                        "at": traceback.format_exc().splitlines()[-6:],
                    }
                )
            finally:
                faulthandler.cancel_dump_traceback_later()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seed": seed,
        "counts": dict(sorted(counts.items())),
        "failures": failures,
        "grown_mib": grown >> 10,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--load", action="store_true")
    given = parser.parse_args()
    if not given.folder.exists():
        given.folder.mkdir(parents=True)
        write_whole(given.folder)
    print(json.dumps(run(given.folder, given.seed, given.first, given.cases, given.load), indent=1))
