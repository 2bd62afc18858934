"""Structured outputs in the engine: answers match, other requests don't notice, nothing that a stranger sends
ends the engine."""

import gc
import json
import random
import re
import threading

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from shoal import SamplingParams, StructuredOutputsParams
from shoal.api import FinishReason, Request
from shoal.config import EngineConfig
from shoal.engine import build_parts
from shoal.engine.grammar_admission import GrammarAdmission
from shoal.engine.process.core_main import _build
from shoal.engine.scheduling import grammar
from shoal.engine.scheduling.grammar import Grammars
from shoal.engine.scheduling.part_state import GrammarRow
from shoal.errors import ConfigError, RequestError
from shoal.kernels.sampling.reference import keep_bits
from shoal.text.tokenizer import Tokenizer, load_tokenizer
from shoal.wire import Start
from tests import tiny

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Printable ASCII: after half a character, an answer's text would begin with its end.
PROMPTS = [random.Random(i).choices(range(94), k=n) for i, n in enumerate((1, 7, 16, 33, 40))]


def token(character):
    """The tiny tokenizer's id of an ASCII character."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(character)


def is_person(text):
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
    )


KINDS = [  # what is asked for, and whether a text is that
    (dict(regex=r"[a-f]{2,5}-[0-9]{1,4}!"), lambda text: re.fullmatch(r"[a-f]{2,5}-[0-9]{1,4}!", text)),
    (
        dict(choice=["yes", "no", "yes and no", 'é "\\\n']),
        lambda text: text in ("yes", "no", "yes and no", 'é "\\\n'),
    ),
    (dict(json=PERSON, whitespace_pattern=" ?"), is_person),
    (dict(json=json.dumps(PERSON), whitespace_pattern=""), is_person),
    (
        dict(json=PERSON, disable_any_whitespace=True),
        lambda text: is_person(text) and re.fullmatch(r'{"name":".*","age":\d+,"tags":\[("[ab]",?)*]}', text),
    ),
    (
        dict(grammar='root ::= sum\nsum ::= number ("+" number){0,3} "=" [A-C]\nnumber ::= [0-9]{1,3}'),
        lambda text: re.fullmatch(r"\d{1,3}(\+\d{1,3}){0,3}=[A-C]", text),
    ),
    (
        dict(grammar='start: "<" inner ">"\ninner: WORD | "<" inner ">"\nWORD: /[x-z]{1,4}/'),
        lambda text: re.fullmatch(r"(<+)[x-z]{1,4}(>+)", text),
    ),
]


def structured(seed, given, **options):
    return SamplingParams(
        **{
            "max_tokens": 180,
            "seed": seed,
            "temperature": (0.0, 0.7, 1.0, 1.6)[seed % 4],
            "structured_outputs": StructuredOutputsParams(**given),
        }
        | options
    )


def plain(seed):
    return SamplingParams(
        max_tokens=30,
        seed=seed,
        temperature=seed % 2 * 1.0,
        ignore_eos=True,
        repetition_penalty=1.0 + seed % 3 / 10,
    )


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def assert_structured(outputs, checks, bounded=True):
    for output, check in zip(outputs, checks):
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length")
        if answer.finish_reason == "stop":
            assert check(answer.text), answer.text
            assert answer.stop_reason is None
    assert not bounded or sum(o.outputs[0].finish_reason == "stop" for o in outputs) > len(outputs) // 2


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(async_scheduling=True),
        dict(async_scheduling=True, max_num_batched_tokens=24, max_num_seqs=8),
        dict(num_gpu_blocks_override=28, async_scheduling=True),
    ],
    ids=str,
)
def test_answers_match_and_plain_requests_beside_them_keep_their_tokens(options, build):
    engine = build(**options)
    prompts = [PROMPTS[i % 5] for i in range(10)]
    alone = ids_of(engine.generate(prompts, [plain(i) for i in range(10)]))
    engine.reset_prefix_cache()
    asked = [(structured(seed, given), check) for seed in range(8) for given, check in KINDS]
    mixed, wanted = [], []
    for i, (params, check) in enumerate(asked):
        mixed.append((PROMPTS[i % 5], params, check))
        if i < 10:
            mixed.append((prompts[i], plain(i), None))
    outputs = engine.generate([m[0] for m in mixed], [m[1] for m in mixed])
    wanted = [(o, m[2]) for o, m in zip(outputs, mixed) if m[2] is not None]
    assert_structured(*zip(*wanted))
    assert ids_of([o for o, m in zip(outputs, mixed) if m[2] is None]) == alone
    if "num_gpu_blocks_override" in options:
        assert engine.stats().num_preemptions > 0


def test_tokens_do_not_depend_on_preemption_or_scheduling(build):
    params = [structured(i, KINDS[i % len(KINDS)][0]) for i in range(18)]
    prompts = [PROMPTS[i % 5] for i in range(18)]
    expected = ids_of(build().generate(prompts, params))
    small = build(num_gpu_blocks_override=20, async_scheduling=True, max_num_batched_tokens=40)
    assert ids_of(small.generate(prompts, params)) == expected
    assert small.stats().num_preemptions > 0


def test_each_of_n_answers_goes_its_own_way(build):
    [output] = build().generate([PROMPTS[1]], structured(3, KINDS[0][0], n=6))
    texts = [a.text for a in output.outputs if a.finish_reason == "stop"]
    assert all(KINDS[0][1](t) for t in texts) and len(set(texts)) > 1


@pytest.mark.parametrize(
    "options",
    [
        dict(ignore_eos=True),
        dict(min_tokens=20),
        dict(min_tokens=20, ignore_eos=True),
        dict(logit_bias={token("q"): 100.0, token("3"): 50.0}),
        dict(repetition_penalty=1.8, presence_penalty=1.0),
        dict(bad_words=["3"]),
        dict(stop_token_ids=[255]),
        dict(logprobs=3),
        dict(top_k=3, top_p=0.8, min_p=0.05),
        dict(prompt_logprobs=1),
    ],
    ids=str,
)
def test_other_parameters_compose(options, build):
    outputs = build(async_scheduling=True).generate(
        [PROMPTS[2]] * 12, [structured(i, KINDS[i % 2][0], **options) for i in range(12)]
    )
    for i, output in enumerate(outputs):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop" and KINDS[i % 2][1](answer.text), answer
        if "bad_words" in options:
            assert "3" not in answer.text


def test_min_tokens_lengthens_where_the_grammar_can(build):
    for output in build().generate(
        [PROMPTS[2]] * 4,
        [structured(i, dict(regex="[a-c]*"), min_tokens=30, max_tokens=60) for i in range(4)],
    ):
        assert len(output.outputs[0].token_ids) >= 30


def test_a_stop_id_and_a_stop_string_end_an_answer_early(build):
    by_id, by_text = build().generate(
        [PROMPTS[2]] * 2,
        [
            structured(1, dict(regex="[ab]{100}"), stop_token_ids=[token("b")]),
            structured(1, dict(regex="[ab]{100}"), stop="b"),
        ],
    )
    assert by_id.outputs[0].stop_reason == token("b") and by_text.outputs[0].stop_reason == "b"
    assert set(by_id.outputs[0].text) | set(by_text.outputs[0].text) <= {"a"}


def test_contradictory_wishes_end_one_request_with_its_error(build):
    core = build().core
    params = structured(0, dict(regex="[a-c]+"), allowed_token_ids=[token("x")])
    core.add(Request("contradictory", PROMPTS[1], params))
    core.add(Request("fine", PROMPTS[1], structured(1, dict(regex="[a-c]{4}")), eos_token_ids=(257,)))
    outputs = run(core)
    assert outputs["contradictory"].finish_reason is FinishReason.ERROR
    assert (
        "allowed_token_ids" in outputs["contradictory"].error
        and outputs["contradictory"].stop_reason == "grammar"
    )
    assert outputs["fine"].finish_reason is FinishReason.STOP


def test_a_grammar_that_does_not_compile_ends_its_request_with_the_reason(build):
    core = build().core
    complex_one = dict(grammar="start: A\nA: /.*a.{20}/ & /.*b.{21}/ & ~/.*c.{22}/")
    for name, given in {"syntax": dict(regex="(["), "complex": complex_one, "fine": dict(regex="a")}.items():
        core.add(Request(name, PROMPTS[1], structured(0, given), eos_token_ids=(257,)))
    outputs = run(core)
    assert outputs["syntax"].finish_reason is outputs["complex"].finish_reason is FinishReason.ERROR
    assert "regex" in outputs["syntax"].error and outputs["complex"].error
    assert outputs["fine"].finish_reason is FinishReason.STOP
    assert not core.parts.find(GrammarAdmission).is_busy


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (dict(regex="([a-c]{0,200}x?){200}a{200}"), "too many expressions"),
        (
            dict(
                json={
                    "type": "object",
                    "properties": {"a": {"$ref": "#/$defs/endless"}},
                    "required": ["a"],
                    "$defs": {"endless": {"$ref": "#/$defs/endless"}},
                },
                whitespace_pattern="",
            ),
            "no text fits it",
        ),
    ],
)
def test_an_answer_whose_grammar_breaks_off_is_an_error_and_no_end_of_text(given, why, build):
    [output] = build().generate([PROMPTS[1]], structured(0, given, max_tokens=100))
    assert output.outputs[0].finish_reason == "error" and why in output.outputs[0].error


def test_an_answer_that_ends_with_an_error_says_why_beside_whole_ones(build):
    contradictory = structured(0, dict(regex="[a-c]+"), allowed_token_ids=[token("x")])
    broken, fine = build().generate([PROMPTS[1]] * 2, [contradictory, structured(1, dict(regex="[a-c]{4}"))])
    [broken], [fine] = broken.outputs, fine.outputs
    assert (broken.finish_reason, broken.stop_reason, broken.text) == ("error", "grammar", "")
    assert "allowed_token_ids" in broken.error
    assert (fine.finish_reason, fine.error) == ("stop", None) and len(fine.text) == 4


@pytest.fixture
def all_are_slow(monkeypatch):
    """Masks that take next to nothing count as slow."""
    monkeypatch.setattr(grammar, "SLOW_S", 0.0)
    monkeypatch.setattr(grammar, "SLOW_ROW_S", 0.0)


@pytest.mark.parametrize(
    "options", [{}, {"num_gpu_blocks_override": 14, "max_num_seqs": 4}], ids=["roomy", "preempted"]
)
def test_masks_that_are_computed_beside_the_steps_are_the_same(options, build, all_are_slow, monkeypatch):
    def answers():
        with build(**options) as llm:
            asked = [structured(i, given) for i, (given, _) in enumerate(KINDS)]
            return ids_of(llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(asked))], asked))

    ahead = answers()
    monkeypatch.undo()
    assert answers() == ahead


def test_a_sequence_whose_grammar_stays_slow_ends_with_an_error_that_says_so(
    build, all_are_slow, monkeypatch
):
    monkeypatch.setattr(grammar, "MOST_SLOW_S", 0.0)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0)
    llm = build()
    slow, other = llm.generate(
        [PROMPTS[1], PROMPTS[2]], [structured(1, dict(regex="[a-f]{50,60}")), plain(1)]
    )
    assert slow.outputs[0].finish_reason == "error" and other.outputs[0].finish_reason == "length"


def test_a_slow_sequence_that_began_elsewhere_has_one_mask_computed_for_each_token_that_is_left(
    build, all_are_slow, monkeypatch
):
    """The outputs of the request do not advance its grammar: while a mask is computed, nothing advances it."""
    compute, computed = Grammars._compute_beside, []

    def count(self, matcher):
        computed.append(matcher)
        return compute(self, matcher)

    monkeypatch.setattr(Grammars, "_compute_beside", count)
    core, params = build().core, structured(1, dict(regex="[a-f]{20,30}"))

    def tokens(request):
        core.add(request)
        ids = []
        while core.has_work:
            ids += [token_id for output in core.step() for token_id in output.token_ids]
        return ids

    whole = tokens(Request("whole", PROMPTS[1], params))
    computed.clear()
    assert tokens(Request("moved", PROMPTS[1], params, output_token_ids=whole[:9])) == whole[9:]
    assert len(computed) == len(whole) - 9


def test_outputs_that_a_grammar_does_not_allow_end_a_request_with_an_error(build):
    core = build().core
    params = structured(1, dict(regex="[a-f]{20,30}"))
    core.add(Request("moved", PROMPTS[1], params, output_token_ids=[token("a"), token("z")]))
    output = run(core)["moved"]
    assert output.finish_reason is FinishReason.ERROR and "the grammar cannot continue" in output.error


def test_others_go_on_while_a_mask_is_computed(build, all_are_slow, monkeypatch):
    """The steps show it too: the delayed sequence is in none of them."""
    compute, release = Grammars._compute_beside, threading.Event()

    def wait_first(self, matcher):
        assert release.wait(60)
        return compute(self, matcher)

    monkeypatch.setattr(Grammars, "_compute_beside", wait_first)
    core = build().core
    core.add(Request("slow", PROMPTS[1], structured(1, dict(regex="[a-f]{20,30}"))))
    core.add(Request("other", PROMPTS[2], plain(1)))
    found = {"slow": [], "other": []}

    def step():
        for output in core.step():
            found[output.request_id] += output.token_ids

    while len(found["other"]) < 30:
        step()
    assert len(found["slow"]) <= 1
    release.set()
    while core.has_work:
        step()
    assert 20 <= len(found["slow"]) <= 31


def test_a_request_whose_mask_is_computed_can_be_aborted(build, all_are_slow, monkeypatch):
    compute, begun = Grammars._compute_beside, threading.Event()

    def tell(self, matcher):
        begun.set()
        return compute(self, matcher)

    monkeypatch.setattr(Grammars, "_compute_beside", tell)
    core = build().core
    core.add(Request("slow", PROMPTS[1], structured(1, dict(regex="[a-f]{20,30}"))))
    while not begun.is_set():
        core.step()
    core.abort("slow")
    while core.has_work:
        core.step()
    core.check()


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(build):
    core = build().core
    core.add(Request("gone", PROMPTS[1], structured(0, KINDS[2][0])))
    core.abort("gone")
    assert run(core)["gone"].finish_reason is FinishReason.ABORT
    assert not core.parts.find(GrammarAdmission).is_busy and not core.has_work


def test_bad_input_is_refused_before_anything_runs(build):
    engine = build()
    with pytest.raises(RequestError, match="regex"):
        engine.generate([PROMPTS[0]] * 2, [plain(0), structured(0, dict(regex="("))])
    assert not engine.core.has_work
    with pytest.raises(RequestError, match="embedding"):
        engine.core.add(Request("e", PROMPTS[1], structured(0, KINDS[0][0]), embed=True))
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        build(skip_tokenizer_init=True).generate([PROMPTS[0]], structured(0, KINDS[0][0], detokenize=False))


def test_hidden_tokens_match_no_text(build):
    [output] = build().generate(
        [PROMPTS[0]], structured(2, dict(regex="(?s:.*)"), max_tokens=200, logit_bias={256: 100.0})
    )
    assert 256 not in output.outputs[0].token_ids


def random_schema(r, depth=0):
    kind = r.choice(["plain"] * 5 + ["nonsense"] + ["object", "array", "of"] * (depth < 3))
    if kind == "object":
        properties = {f"p{i}": random_schema(r, depth + 1) for i in range(r.randint(0, 3))}
        return {
            "type": "object",
            "properties": properties,
            "required": r.sample(sorted(properties), r.randint(0, len(properties))),
            "additionalProperties": r.random() < 0.3,
        }
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(r, depth + 1),
            "minItems": r.randint(0, 2),
            "maxItems": r.randint(0, 4),
        }
    if kind == "of":
        return {
            r.choice(["anyOf", "anyOf", "oneOf", "allOf"]): [
                random_schema(r, depth + 1) for _ in range(r.randint(0, 3))
            ]
        }
    if kind == "nonsense":
        return r.choice(
            [
                {"type": 7},
                {"not": {}},
                {"properties": []},
                {"$ref": "#/no"},
                {},
                {"items": "x"},
                {"required": 5},
                {"type": "string", "pattern": "("},
                {"maxLength": -1},
                {"maximum": "three"},
                {"format": "unknown"},
            ]
        )
    return r.choice(
        [
            {"type": "string", "maxLength": r.randint(0, 5)},
            {"type": "string", "pattern": r.choice(["^a+$", "x|y"])},
            {"type": "string"},
            {"type": "string", "format": r.choice(["date", "uuid"])},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"type": "integer", "minimum": r.randint(-9, 9), "maximum": r.randint(-9, 99)},
            {"type": "integer", "multipleOf": 3},
            {"type": "number", "exclusiveMinimum": 0.5},
            {"enum": r.sample([1, "a", None, {"b": [2.5]}, True], r.randint(0, 3))},
            {"const": r.choice(["é", 0, []])},
        ]
    )


def test_two_hundred_random_schemas_give_json_or_a_request_error(build):
    print("seeds 0..199")
    engine, asked, refused = build(max_num_seqs=32, async_scheduling=True), [], 0
    for seed in range(200):
        schema = random_schema(random.Random(seed))
        params = structured(seed, dict(json=schema, whitespace_pattern=""), max_tokens=60)
        try:
            engine._group([1], params, 0)
        except RequestError:
            refused += 1
            continue
        asked.append(params)
    outputs = engine.generate([[1, 2, 3]] * len(asked), asked)
    ended = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    for answer in ended:
        json.loads(answer.text)
    assert len(ended) > 60 and 20 < refused < 150
    assert {o.outputs[0].finish_reason for o in outputs} <= {"stop", "length", "error"}
    assert ids_of(engine.generate([PROMPTS[1]], plain(0))) == ids_of(build().generate([PROMPTS[1]], plain(0)))


@pytest.mark.parametrize("vocab_size", [31, 32, 300, 1000])
def test_only_tokens_whose_bit_is_set_stay_possible(vocab_size):
    g = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=g)
    allowed = torch.rand(3, vocab_size, generator=g) < 0.3
    words = -(-vocab_size // 32)
    bits = np.zeros((3, words * 32), np.uint8)
    bits[:, :vocab_size] = allowed.numpy()
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    changed, rows = logits.clone(), [4, 0, 2]
    keep_bits(
        changed, torch.tensor(rows), torch.from_numpy(np.concatenate([packed[:, :1], packed], axis=1))[:, 1:]
    )
    for i, row in enumerate(rows):
        assert torch.equal(changed[row], logits[row].masked_fill(~allowed[i], -torch.inf))
    assert torch.equal(changed[[1, 3]], logits[[1, 3]])


def test_a_vocabulary_larger_than_the_tokenizers_is_never_drawn_from(build):
    tokenizer = build().get_tokenizer()
    grammars = Grammars(lambda: tokenizer, 1000, (257, 5000))
    grammar = grammars.start(StructuredOutputsParams(regex="[ab]")).result()
    masks = grammars.masks([GrammarRow(0, grammar, [token("a")], None)])
    assert np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist() == [token("b")]


def allowed_in(masks):
    """The tokens that each row allows."""
    return [np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() for mask in masks]


def test_a_text_that_must_follow_may_be_written_in_any_tokens(tmp_path):
    """Regression: only the tokens that the tokenizer makes of it were allowed, so that a model which spelled it in
    other ones was led away from its words, and bad_words with one of them left no token."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*characters, "no", "now"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("n", "o"), ("no", "w")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    grammars = Grammars(lambda: loaded, 300, (299,))
    grammar = grammars.start(StructuredOutputsParams(regex="now!")).result()
    whole, n = [vocab["now"], token("!")], token("n")
    assert grammar.draft([], 4) == (whole, 2)
    free, restricted = GrammarRow(0, grammar, [], None), GrammarRow(0, grammar, [vocab["now"]], None)
    assert allowed_in(grammars.masks([free])) == [[n, vocab["no"], vocab["now"]]]
    assert allowed_in(grammars.masks([restricted])) == [[n, vocab["no"]]]
    assert grammar.accept(n)
    assert allowed_in(grammars.masks([free])) == [[token("o")]] and grammar.draft([], 1) == ([token("o")], 1)


def test_a_marker_that_must_follow_is_its_own_token_also_behind_drafts(build):
    tokenizer = build().get_tokenizer()
    grammars = Grammars(lambda: tokenizer, 300, (257,))
    begin, a, b = 256, token("a"), token("b")
    for regex, first, then in [("a<begin>b", [a], [begin]), ("a(<begin>|<x>)b", [a], [token("<"), begin])]:
        grammar = grammars.start(StructuredOutputsParams(regex=regex), (), shows_special=True).result()
        rows = [
            GrammarRow(0, grammar, [], None),
            *(GrammarRow(0, grammar, [], None, after) for after in ([a], [a, begin])),
        ]
        assert allowed_in(grammars.masks(rows)) == [first, then, [b]]


def test_two_threads_may_ask_for_the_first_mask_ahead_at_once(build, monkeypatch):
    """The engine's own thread and the one that compiles do."""
    make = grammar.LLExecutor
    making, release = threading.Event(), threading.Event()

    def make_slowly(*threads):
        making.set()
        assert release.wait(60)
        return make(*threads)

    tokenizer = build().get_tokenizer()
    grammars = Grammars(lambda: tokenizer, 300, (257,))
    first, second = (grammars.start(StructuredOutputsParams(regex=r)).result() for r in ("[ab]", "[cd]"))
    monkeypatch.setattr(grammar, "LLExecutor", make_slowly)
    other = threading.Thread(target=first.begin_ahead)
    other.start()
    assert making.wait(60)
    second.begin_ahead()
    release.set()
    other.join()
    masks = np.stack([first.take_ahead(), second.take_ahead()]).view(np.uint8)
    found = [np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() for mask in masks]
    assert found == [[token("a"), token("b")], [token("c"), token("d")]]


MARKED = [  # grammars with a marker that is one special token of the tiny model
    dict(choice=["<begin>yes"]),
    dict(regex=r"<begin>yes"),
    dict(regex=r"(<begin>)y[e]s"),
    dict(grammar='start: "<begin>" ANSWER\nANSWER: "yes"'),
    dict(grammar='root ::= "<begin>yes"'),
    dict(
        structural_tag={
            "type": "structural_tag",
            "format": {
                "type": "tag",
                "begin": "<begin>",
                "content": {"type": "const_string", "value": "y"},
                "end": "es",
            },
        }
    ),
]


@pytest.mark.parametrize("given", MARKED, ids=str)
def test_a_grammar_takes_a_text_with_a_special_token(build, given):
    """Regression: a grammar with a special token's text ended with the error that it cannot continue."""
    engine = build()
    params = [structured(1, given, skip_special_tokens=skips, max_tokens=20) for skips in (True, False)]
    hidden, shown = (o.outputs[0] for o in engine.generate([PROMPTS[0]] * 2, params))
    assert (hidden.text, hidden.finish_reason) == ("<begin>yes", "stop") and 256 not in hidden.token_ids
    assert (shown.text, shown.finish_reason) == ("<begin>yes", "stop") and shown.token_ids[0] == 256


def test_free_text_has_only_the_special_tokens_that_its_grammar_names(build):
    engine = build()
    favoured = {256: 100.0}
    for regex, named in (("[a-z<>]{4,9}", False), ("(<begin>|[a-z]){1,4}", True), ("[<]begi[n]>", False)):
        params = structured(0, dict(regex=regex), skip_special_tokens=False, logit_bias=favoured)
        answer = engine.generate([PROMPTS[0]], params)[0].outputs[0]
        assert (256 in answer.token_ids) is named and re.fullmatch(regex, answer.text)
        assert answer.finish_reason == "stop"


def run(core):
    outputs = {}
    for _ in range(20000):
        for output in core.step():
            outputs[output.request_id] = output
        if not core.has_work:
            return outputs
    raise AssertionError("no end")


def test_an_engine_and_a_request_say_whether_objects_are_closed(build):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}}
    favoured = {token("}"): 50.0, token('"'): 75.0, token("z"): 100.0}

    def keys(engine, **given):
        params = structured(
            1, dict(json=schema, whitespace_pattern="", **given), logit_bias=favoured, max_tokens=60
        )
        return engine.generate([PROMPTS[0]], params)[0].outputs[0].text

    closed, opened = build(), build(structured_outputs_config='{"disable_additional_properties": false}')
    assert "z" not in keys(closed) and "z" in keys(closed, disable_additional_properties=False)
    assert "z" in keys(opened) and "z" not in keys(opened, disable_additional_properties=True)


@pytest.mark.parametrize(
    "given, said",
    [
        ("{", "JSON"),
        ({"disable_additional_property": True}, "did you mean 'disable_additional_properties'"),
        ({"disable_additional_properties": 1}, "must be true or false"),
    ],
)
def test_a_wrong_structured_outputs_config_is_named(given, said):
    with pytest.raises(ConfigError, match=f"structured_outputs_config.*{said}"):
        EngineConfig.from_options(structured_outputs_config=given)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_an_engine_of_a_server_has_the_tokens_table_before_its_first_request(
    has_tokenizer, root, engine_options, monkeypatch
):
    """Building it delays every stream. Without a usable tokenizer the engine serves, and a request with a grammar gets an error that says why."""
    loads = []

    def load(files, tokenizer):
        loads.append(files)
        if not has_tokenizer:
            raise ValueError("tokenizer.json is damaged")
        return load_tokenizer(files, tokenizer)

    monkeypatch.setattr(build_parts, "load_tokenizer", load)
    config = EngineConfig.from_options(model=str(tiny.write_model(root, "qwen3")), **engine_options)
    core, _ = _build(Start(config))
    gc.unfreeze()
    try:
        assert len(loads) == 1
        core.add(Request("x", PROMPTS[1], structured(0, dict(regex="[a-c]{4}")), eos_token_ids=(257,)))
        core.add(Request("y", PROMPTS[1], SamplingParams(max_tokens=4), eos_token_ids=(257,)))
        ended = run(core)
        assert ended["y"].finish_reason is FinishReason.LENGTH
        if has_tokenizer:
            assert ended["x"].finish_reason is FinishReason.STOP and len(loads) == 1
        else:
            assert ended["x"].finish_reason is FinishReason.ERROR and "damaged" in ended["x"].error
    finally:
        core.exit()
