"""Requests with options of sampling (penalties, bias, allowed and banned tokens), and the tokens that they get
one after the other, by vLLM's formulas over the oracle's logits. For engines on a CPU and on a GPU."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch

from shoal import SamplingParams
from shoal.api import Request
from tests import tiny

COUNT, END = 20, 257
PROMPTS = [
    random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 5, 16, 17, 31, 64, 100, 3, 90, 40))
]


def naive(folder: Path, request: Request) -> list[int]:
    """The greedy answer, token by token, each from the whole text before it."""
    params, prompt, output = request.params, request.prompt_token_ids, []
    while len(output) < COUNT:
        x = tiny.logits(folder, prompt + output)
        if params.allowed_token_ids is not None:
            kept = torch.full_like(x, -math.inf)
            kept[params.allowed_token_ids] = x[params.allowed_token_ids]
            x = kept
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        for token in {*prompt, *output}:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        for token in set(output):
            x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        if len(output) < params.min_tokens:
            x[sorted(request.stop_ids)] = -math.inf
        for word in request.bad_word_ids:
            before = len(word) - 1
            if before <= len(output) and tuple(output[len(output) - before :]) == word[:-1]:
                x[word[-1]] = -math.inf
        output.append(int(x.argmax()))
        if output[-1] in request.stop_ids and not params.ignore_eos:
            break
    return output


def requests(folder: Path) -> list[Request]:
    """Plain requests beside ones with each option, alone and together."""
    free = tiny.greedy(folder, PROMPTS[5], COUNT)
    options = [
        {},
        dict(repetition_penalty=1.4),
        dict(presence_penalty=1.5, frequency_penalty=-0.5),
        {},
        dict(logit_bias={7: 6.0, 9: -100.0, 200: 5.0}),
        dict(),
        dict(allowed_token_ids=[*range(40, 90)], frequency_penalty=2.0),
        dict(min_tokens=6, ignore_eos=False, logit_bias={END: 100.0}),
        dict(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={65: 3.0}),
        {},
    ]
    words = {5: ((free[2],), tuple(free[4:6]), tuple(free[7:10])), 8: ((65, 65), (66,))}
    found = []
    for i, (prompt, changes) in enumerate(zip(PROMPTS, options)):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | changes)
        found.append(Request(f"{i}", prompt, params, eos_token_ids=(END,), bad_word_ids=words.get(i, ())))
    return found


def run(core, asked: list[Request]) -> list[list[int]]:
    """The tokens of requests that run together."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in asked}
    for request in asked:
        core.add(request)
    rest = set(answers)
    while rest:
        for output in core.step():
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                rest.remove(output.request_id)
    return list(answers.values())
