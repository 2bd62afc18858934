"""The official openai client, and careful readers of raw chunks, against the server with a fake engine."""

import base64
import json
import struct
from types import SimpleNamespace

import openai
import pytest

from shoal.api import Logprob
from shoal.model_card import ModelCard
from shoal.server.apis import completions
from shoal.server.apis.response_shapes import LogprobShapes, TextPlace
from shoal.server.http.client_warnings import MAX_WARNINGS, ClientWarnings
from shoal.server.served.model import loaded_model
from shoal.text.tokenizer import Tokenizer
from shoal.wire import ModelInfo
from tests import http_shapes, texts
from tests.fake_server import NAME, FakeServer, engine_saying, ids_of

TEXT = "hello world, how are you? "


@pytest.fixture(scope="module")
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def served(server):
    return server


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, **options}
    )


def complete(client, **options):
    return client.completions.create(**{"model": NAME, "prompt": "hello", "max_tokens": 16, **options})


def test_chat_answers_with_usage(client):
    answer = chat(client)
    assert answer.choices[0].message.content == TEXT[:16] and answer.choices[0].finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (16, len("<user>hi<assistant>"))
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == NAME


def test_a_chat_stream_is_the_whole_answer_in_pieces(client):
    parts = list(chat(client, stream=True, n=2, stream_options={"include_usage": True}))
    for index in (0, 1):
        mine = [p.choices[0] for p in parts if p.choices and p.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "length"
        assert "".join(c.delta.content or "" for c in mine) == TEXT[:16]
    assert (
        parts[-1].usage.completion_tokens == 32 and not parts[-1].choices and len({p.id for p in parts}) == 1
    )
    assert all(p.usage is None for p in parts[:-1])


def test_usage_can_be_in_every_chunk(server):
    events = server.events(
        "/v1/completions",
        {
            "prompt": "a",
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    )
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 5


def test_usage_in_every_chunk_counts_what_was_sent(server):
    """Regression: the first chunk of a chat, which has a role and no text, counted a token."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    events = server.events("/v1/chat/completions", body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == [0, 1, 2, 3, 4, 4]
    assert all(e["usage"]["total_tokens"] == e["usage"]["prompt_tokens"] + n for e, n in zip(events, counts))


def test_fields_that_vllm_gives_as_null_are_there(server, client):
    """Regression: they were left out, and attributes of OpenAI's client raised in place of being None."""
    answer = chat(client)
    for name in ("prompt_logprobs", "prompt_token_ids", "system_fingerprint", "service_tier"):
        assert getattr(answer, name) is None
    for name in ("refusal", "annotations", "audio", "function_call", "reasoning"):
        assert getattr(answer.choices[0].message, name) is None
    assert answer.choices[0].token_ids is None and answer.choices[0].stop_reason is None
    answer = complete(client)
    assert answer.system_fingerprint is None
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason"):
        assert getattr(answer.choices[0], name) is None


def test_minus_one_token_means_as_many_as_fit(client):
    assert chat(client, max_tokens=-1).usage.total_tokens == 256
    assert chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=-1).usage.total_tokens == 256
    assert complete(client, max_tokens=-1, prompt=[1] * 200).usage.completion_tokens == 56
    for ask, name in ((chat, "max_tokens"), (chat, "max_completion_tokens"), (complete, "max_tokens")):
        for wrong in (0, -2):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, **{"max_tokens": openai.NOT_GIVEN, name: wrong})
            assert caught.value.param == name


def test_max_completion_tokens_and_max_tokens(client):
    assert chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=3).usage.completion_tokens == 3
    assert chat(client, max_tokens=openai.NOT_GIVEN).usage.total_tokens == 256  # what is left
    assert complete(client, max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 16
    assert complete(client, max_tokens=openai.NOT_GIVEN, prompt=[1] * 250).usage.completion_tokens == 6


def test_prompts_come_as_text_ids_and_lists_of_both(client):
    for prompt, tokens in (("abc", 3), ([1, 2], 2), (["a", "bc"], 3), ([[1], [2, 3], [4]], 4)):
        answer = complete(client, prompt=prompt, n=2)
        assert answer.usage.prompt_tokens == tokens
        assert [c.index for c in answer.choices] == list(range(len(answer.choices)))


def test_stop_strings_end_an_answer_and_its_request(server, client):
    for stream in (False, True):
        answer = complete(client, stop=["wor", "zzz"], max_tokens=200, stream=stream)
        parts = list(answer) if stream else [answer]
        assert "".join(p.choices[0].text for p in parts) == "hello "
        assert parts[-1].choices[0].finish_reason == "stop" and parts[-1].choices[0].stop_reason == "wor"
    text = complete(client, stop="wor", extra_body={"include_stop_str_in_output": True}).choices[0].text
    assert text == "hello wor"
    assert server.metric("vllm:num_requests_running") == 0


def test_chat_logprobs(client):
    content = chat(client, logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    assert [c.token for c in content] == list("hell") and [len(c.top_logprobs) for c in content] == [3] * 4
    assert content[0].bytes == [ord("h")] and content[0].logprob == content[0].top_logprobs[0].logprob
    alone = chat(client, logprobs=True, max_tokens=2).choices[0].logprobs.content
    assert [c.top_logprobs for c in alone] == [[], []]
    choices = [p.choices[0] for p in chat(client, logprobs=True, max_tokens=4, stream=True)]
    assert [c.token for choice in choices if choice.logprobs for c in choice.logprobs.content] == list("hell")
    assert chat(client).choices[0].logprobs is None


def test_the_token_that_ends_an_answer_has_a_chunk_of_its_own():
    """Regression: with drafts it came with the text before it, for whose tokens guidance takes all of a chunk."""
    with FakeServer(engine_saying("hello", ends=True, token_seconds=1e-9)) as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
        parts = list(chat(client, logprobs=True, stream=True, max_tokens=20))
    *texts, end = [part.choices[0] for part in parts if part.choices[0].logprobs]
    for choice in texts:
        assert "".join(c.token for c in choice.logprobs.content) == choice.delta.content
    assert "".join(choice.delta.content for choice in texts) == "hello"
    assert not end.delta.content and len(end.logprobs.content) == 1 and end.finish_reason == "stop"


def test_completion_logprobs_and_echo(client):
    answer = complete(client, prompt="ab", echo=True, logprobs=2, max_tokens=3).choices[0]
    assert answer.text == "abhel" and answer.logprobs.tokens == list("abhel")
    assert answer.logprobs.token_logprobs[0] is None and answer.logprobs.top_logprobs[0] is None
    assert answer.logprobs.text_offset == [0, 1, 2, 3, 4] and all(
        len(t) == 2 for t in answer.logprobs.top_logprobs[1:]
    )
    parts = list(complete(client, prompt="ab", echo=True, logprobs=2, max_tokens=3, stream=True))
    assert "".join(p.choices[0].text for p in parts) == "abhel"
    assert [o for p in parts for o in p.choices[0].logprobs.text_offset] == [0, 1, 2, 3, 4]
    assert complete(client, prompt=ids_of("xy"), echo=True, max_tokens=1).choices[0].text == "xyh"


def test_offsets_of_a_completion_count_what_the_tokens_spell_and_not_what_is_held_back(client):
    options = dict(prompt="ab", stop=["lloZ"], logprobs=0, max_tokens=5)
    whole = complete(client, **options).choices[0].logprobs.text_offset
    parts = [part.choices[0].logprobs for part in complete(client, **options, stream=True)]
    assert whole == [0, 1, 2, 3, 4] == [offset for part in parts if part for offset in part.text_offset]
    prompt = "é ü😀!"
    echoed = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=1).choices[0]
    spelt = [(i, letter) for i, letter in enumerate(echoed.text) for _ in letter.encode()]
    assert echoed.logprobs.text_offset == [i for i, _ in spelt]


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("text", ["the city of light", " the city", "caf\u00e9 \U0001f600!"])
def test_offsets_with_sentencepiece_leave_out_what_the_tokenizer_put_before_the_text(text, has_bos):
    tokenizer = Tokenizer.from_gguf(texts.sentencepiece_metadata())
    ids = [tokenizer.bos_token_id] * has_bos + tokenizer.encode(text, add_special_tokens=False)
    asked = SimpleNamespace(
        model=SimpleNamespace(loaded=SimpleNamespace(tokenizer=tokenizer)),
        generation=SimpleNamespace(params=SimpleNamespace(skip_special_tokens=True)),
    )
    place, offsets = TextPlace(tokenizer.token_bytes.errors), []
    for data in completions._Answer._spelt(asked, ids, text, []):
        offsets.append(place.offset)
        place.move(data)
    assert place.offset == len(text) and offsets[0] == 0
    words = [i for i, piece in enumerate(tokenizer.convert_ids_to_tokens(ids)) if piece.startswith("\u2581")]
    assert [text[offsets[i] :][:1] for i in words[1:]] == [" "] * len(words[1:])


def test_of_tokens_with_one_text_the_drawn_one_is_shown():
    shapes = LogprobShapes(SimpleNamespace(loaded=SimpleNamespace(tokenizer=None)), 3, as_ids=False)
    step = {7: Logprob(-2.0, 3, "\ufffd"), 8: Logprob(-0.5, 1, "\ufffd"), 9: Logprob(-1.0, 2, "a")}
    for drawn, value in ((7, -2.0), (8, -0.5)):
        shown = shapes.completion([drawn], [step], [b"\xf0"], TextPlace())
        assert shown["top_logprobs"] == [{"\ufffd": value, "a": -1.0}] and shown["token_logprobs"] == [value]


def test_no_tokens_with_echo_is_the_prompt_alone(server, client):
    for stream in (False, True):
        answer = complete(client, echo=True, logprobs=1, max_tokens=0, stream=stream)
        [choice] = [c for part in (answer if stream else [answer]) for c in part.choices]
        assert (
            choice.text == "hello"
            and choice.finish_reason == "length"
            and choice.logprobs.tokens == list("hello")
        )
        assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.token_logprobs) == 5
    status, answer = server.json("/v1/completions", {"prompt": "hello", "max_tokens": 0})
    assert status == 400 and answer["error"]["param"] == "max_tokens"


def test_prompt_logprobs_and_token_ids(server):
    status, answer = server.json(
        "/v1/completions", {"prompt": "abc", "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    )
    choice = answer["choices"][0]
    assert (
        status == 200 and choice["token_ids"] == ids_of("he") and choice["prompt_token_ids"] == ids_of("abc")
    )
    assert (
        choice["prompt_logprobs"][0] is None
        and choice["prompt_logprobs"][1][str(ids_of("b")[0])]["decoded_token"] == "b"
    )
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "return_token_ids": True,
        "prompt_logprobs": 0,
    }
    answer = server.json("/v1/chat/completions", body)[1]
    assert answer["choices"][0]["token_ids"] == ids_of("he") and len(answer["prompt_logprobs"]) == len(
        answer["prompt_token_ids"]
    )
    events = server.events("/v1/chat/completions", {**body, "stream": True})
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for e in events for c in e["choices"] for i in c.get("token_ids", ())] == ids_of("he")


def test_sampling_fields_reach_the_engine_by_their_names(server):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
        "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
        "bad_words": ["bad"],
        "logit_bias": {"5": -3},
    }
    body = {"prompt": "a", "max_tokens": 4, "priority": 3, "cache_salt": "salt", **fields}
    assert server.json("/v1/completions", body)[0] == 200
    request = server.engine.seen[-1]
    for name, value in fields.items():
        assert getattr(request.params, name) == ({5: -3.0} if name == "logit_bias" else value), name
    assert (request.priority, request.cache_salt, request.params.max_tokens, request.eos_token_ids) == (
        3,
        "salt",
        4,
        (257,),
    )
    assert request.bad_word_ids[0] == tuple(ids_of("bad"))


def test_each_of_n_answers_has_a_seed_of_its_own(server):
    server.json("/v1/completions", {"prompt": ["a", "b"], "n": 2, "seed": 5, "max_tokens": 1})
    assert [r.params.seed for r in server.engine.seen[-4:]] == [5, 6, 5, 6]
    server.json("/v1/completions", {"prompt": ["a"], "n": 2, "max_tokens": 1})
    assert len({r.params.seed for r in server.engine.seen[-2:]}) == 2


def test_the_models_own_defaults_are_used_where_the_request_is_silent():
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "strange": 1}
    with FakeServer(model={"generation_config": config}) as server:
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert server.json("/v1/chat/completions", body)[1]["usage"]["completion_tokens"] == 7
        assert (server.engine.seen[-1].params.temperature, server.engine.seen[-1].params.top_k) == (0.6, 20)
        server.json("/v1/chat/completions", {**body, "temperature": 0.0})
        assert server.engine.seen[-1].params.temperature == 0.0


def test_structured_outputs_reach_the_engine(server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    structure = {"begin": "<f>", "schema": schema, "end": "</f>"}
    older = {"type": "structural_tag", "structures": [structure], "triggers": ["<f>"]}
    for given, expected in (
        ({"response_format": {"type": "json_object"}}, ("json_object", True)),
        ({"response_format": named}, ("json", schema)),
        ({"structured_outputs": {"regex": "[0-9]+"}}, ("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("choice", ["yes", "no"])),
        ({"response_format": {"type": "json_object", "schema": schema}}, ("json", schema)),
        ({"response_format": {"type": "json_schema", "schema": schema}}, ("json", schema)),
        ({"response_format": {"type": "json_object", "schema": {}}}, ("json_object", True)),
        ({"json_schema": schema}, ("json", schema)),
        ({"json_schema": schema, "grammar": ""}, ("json", schema)),
        ({"grammar": 'root ::= "a"{5,5}', "json_schema": None}, ("grammar", 'root ::= "a"{5,5}')),
        ({"response_format": tag}, ("structural_tag", tag)),
        ({"response_format": older}, ("structural_tag", older)),
    ):
        status, answer = server.json(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **given}
        )
        assert status == 200, answer
        assert getattr(server.engine.seen[-1].params.structured_outputs, expected[0]) == expected[1]
    assert server.json("/v1/completions", {"prompt": "x", "response_format": {"type": "text"}})[0] == 200
    assert server.engine.seen[-1].params.structured_outputs is None


def with_floats(value):
    """As the JSON of a language without integers: 2.0 for 2."""
    if isinstance(value, dict):
        return {key: with_floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_floats(inner) for inner in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("path", sorted(http_shapes.BODIES.keys() - http_shapes.ADMIN_PATHS))
def test_whole_floats_are_integers_as_in_json_schema(path, server):
    body = {key: value for key, value in http_shapes.BODIES[path].items() if key != "tools"}
    assert server.request(path, with_floats(body))[0] == server.request(path, body)[0] == 200


def test_other_floats_are_no_integers_and_named_though_whole_ones_are_beside_them(server):
    status, _, text = server.request(
        "/v1/completions", {"prompt": "x", "max_tokens": 2.0, "n": 1.5, "seed": 3.0}
    )
    assert status == 400 and json.loads(text)["error"]["param"] == "n"


def test_a_number_out_of_range_is_refused_although_a_whole_float_is_beside_it(server):
    body = b'{"prompt": "x", "max_tokens": 2.0, "temperature": 1e400}'
    status, _, text = server.request("/v1/completions", body)
    assert status == 400, text


def test_embeddings_as_numbers_and_base64(server, client):
    data = client.embeddings.create(model=NAME, input=["a", "b"]).data  # the client asks for base64
    plain = client.embeddings.create(model=NAME, input=["a", "b"], encoding_format="float").data
    assert [len(d.embedding) for d in data] == [64, 64] and data[0].embedding == pytest.approx(
        plain[0].embedding, abs=1e-6
    )
    raw = server.json("/v1/embeddings", {"input": [[1, 2]], "encoding_format": "base64"})[1]["data"][0][
        "embedding"
    ]
    assert len(struct.unpack("<64f", base64.b64decode(raw))) == 64
    short = (
        client.embeddings.create(model=NAME, input="a", dimensions=3, encoding_format="float")
        .data[0]
        .embedding
    )
    assert sum(v * v for v in short) == pytest.approx(1.0) and len(short) == 3
    assert server.json("/v1/embeddings", {"input": "a", "dimensions": 65})[0] == 400
    assert server.json("/v1/embeddings", {"input": "a" * 300})[0] == 400
    assert (
        server.json("/v1/embeddings", {"input": "a" * 300, "truncate_prompt_tokens": -1})[1]["usage"][
            "prompt_tokens"
        ]
        == 256
    )


def test_a_request_for_embeddings_may_have_more_inputs_than_the_queue():
    """Regression: 2,048 inputs, the most that OpenAI documents, were a 400 as the queue takes 1,088."""
    with FakeServer(model={"max_num_seqs": 2}, max_queued_requests=5) as server:
        server.engine.prefill_seconds, most_running = 0.0005, 0

        class Counting(dict):
            def __setitem__(self, key, value):
                nonlocal most_running
                super().__setitem__(key, value)
                most_running = max(most_running, len(self))

        server.engine._running = Counting()
        texts = [chr(ord("a") + i % 26) for i in range(2048)]
        status, found = server.json("/v1/embeddings", {"input": texts, "dimensions": 2})
        assert status == 200 and [each["index"] for each in found["data"]] == list(range(2048))
        first = server.json("/v1/embeddings", {"input": texts[:26], "dimensions": 2})[1]["data"]
        assert [e["embedding"] for e in found["data"][:26]] == [e["embedding"] for e in first]
        assert most_running == 3, "half of the queue's places"
        assert server.json("/load")[1]["server_load"] == 0
        status, _, text = server.request("/v1/embeddings", {"input": ["a"] * 2049})
        assert status == 400 and "must have at most 2048 entries, got 2049" in text


def test_a_model_is_found_by_a_name_of_any_characters():
    with FakeServer(model={"names": ["a%20b/c d"]}) as server:
        assert server.json("/v1/models/a%2520b/c%20d")[1]["id"] == "a%20b/c d"


def test_models_are_listed_under_all_their_names():
    with FakeServer(model={"names": ["first", "org/second"]}) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        assert [m.id for m in client.models.list().data] == ["first", "org/second"]
        assert client.models.retrieve("org/second").id == "org/second"
        assert complete(client, model="org/second").model == "first"
        with pytest.raises(openai.NotFoundError) as error:
            complete(client, model="third")
        assert error.value.code == "model_not_found"
        assert "the model 'third' does not exist; choose first" in error.value.message


def test_the_context_of_a_server_ends_where_its_kv_cache_does():
    """Regression: /v1/models had max_model_len, and a prompt longer than the cache was an error without a code."""
    info = ModelInfo("m", 1, 4096, 512, 64, (2,), {}, 4, 64, 16, 4, "cpu", "float32")
    card = ModelCard(info=info, names=["m"], model="m", eos_token_ids=(2,))
    assert loaded_model(card, None).max_model_len == info.kv_cache_tokens == 64


def test_tokenize_and_back(server):
    status, answer = server.json("/tokenize", {"prompt": "hi there", "return_token_strs": True})
    assert (
        status == 200
        and answer["count"] == 8
        and answer["max_model_len"] == 256
        and answer["token_strs"][0] == "h"
    )
    assert server.json("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"] == "hi there"
    messages = server.json("/tokenize", {"messages": [{"role": "user", "content": "x"}]})[1]["tokens"]
    assert server.json("/detokenize", {"tokens": messages})[1]["prompt"] == "<user>x<assistant>"


def test_chat_template_options(server):
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "sure,"}]}
    server.json("/v1/chat/completions", {**body, "continue_final_message": True, "max_tokens": 1})
    assert server.engine.seen[-1].prompt_token_ids == ids_of("<user>x<assistant>sure,")
    server.json(
        "/v1/chat/completions",
        {**body, "add_generation_prompt": False, "max_tokens": 1, "truncate_prompt_tokens": 5},
    )
    assert server.engine.seen[-1].prompt_token_ids == ids_of("sure,")
    status, answer = server.json("/v1/chat/completions", {**body, "chat_template": "{{ 1 }}"})
    assert status == 400 and answer["error"]["param"] == "chat_template"
    assert server.json("/v1/chat/completions", {**body, "chat_template_kwargs": {"messages": []}})[0] == 400
    with FakeServer(trust_request_chat_template=True) as trusting:
        more = {"chat_template": "{{ word }}", "chat_template_kwargs": {"word": "w"}}
        assert trusting.json("/v1/chat/completions", {**body, **more})[0] == 200
        assert trusting.engine.seen[-1].prompt_token_ids == ids_of("w")


def test_long_texts_are_tokenized_beside_the_loop():
    with FakeServer(model={"max_model_len": 10**6}) as long:
        assert (
            long.json("/v1/completions", {"prompt": "x" * 50_000, "max_tokens": 1})[1]["usage"][
                "prompt_tokens"
            ]
            == 50_000
        )
        body = {"messages": [{"role": "user", "content": "y" * 50_000}], "max_tokens": 1}
        assert long.json("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"] > 50_000


@pytest.mark.parametrize(
    "path, body",
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "y" * 50_000}]}]},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "y"}], "documents": [{"text": "y" * 50_000}]},
        ),
        ("/v1/completions", {"prompt": ["y" * 100] * 500}),
        ("/v1/completions", {"prompt": "y", "structured_outputs": {"regex": "(.*a){200}"}}),
    ],
    ids=["parts", "documents", "many", "grammar"],
)
def test_what_takes_long_is_done_beside_the_loop(path, body):
    with FakeServer(model={"max_model_len": 10**6}) as server:
        works, threads = [], server.model._threads
        run, run_bounded = threads.run, threads.run_bounded
        threads.run = lambda work: works.append(work) or run(work)
        threads.run_bounded = lambda work, *limits: works.append(work) or run_bounded(work, *limits)
        assert server.request(path, {"max_tokens": 1, **body})[0] == 200
        assert works


def test_tools_and_reasoning_are_parsed_in_streams_and_whole_answers():
    said = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "pick", "arguments": {"n": 1}}\n</tool_call>'
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "max_model_len": 1024}
    with FakeServer(engine_saying(said, ends=True), model=parsers) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        answer = chat(client, tools=[tool], max_tokens=200).choices[0]
        call = answer.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "pick",
            {"n": 1},
        ) and answer.finish_reason == "tool_calls"
        assert answer.message.reasoning_content == "hm" and not answer.message.content
        messages = [{"role": "user", "content": "hi"}]
        with client.chat.completions.stream(
            model=NAME, messages=messages, tools=[tool], max_tokens=200
        ) as stream:
            whole = stream.get_final_completion().choices[0]
        call = whole.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments), whole.finish_reason) == (
            "pick",
            {"n": 1},
            "tool_calls",
        )
        plain = chat(client, max_tokens=200, extra_body={"include_reasoning": False}).choices[0].message
        assert not hasattr(plain, "reasoning_content") and plain.content.startswith("<tool_call>")


def test_more_tokens_than_fit_are_as_many_as_fit_in_chats(client, served):
    for options in (
        {"max_tokens": 8192},
        {"max_tokens": openai.NOT_GIVEN, "max_completion_tokens": 32_000, "stream": True},
    ):
        answer = chat(client, **options)
        if "stream" in options:
            assert "".join(part.choices[0].delta.content or "" for part in answer).startswith(TEXT)
        request = served.last_request()
        assert request.params.max_tokens == 256 - len(request.prompt_token_ids)
    prompt = chat(
        client,
        max_tokens=8192,
        messages=[{"role": "user", "content": "a" * 300}],
        extra_body={"truncate_prompt_tokens": -1},
    )
    assert prompt.usage.prompt_tokens == 255 and prompt.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
        chat(client, max_tokens=8192, messages=[{"role": "user", "content": "a" * 300}])


@pytest.mark.parametrize(
    "given, kind, value",
    [
        ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": " ?"}, "json", {"type": "object"}),
        ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_vllms_older_names_of_structured_outputs_mean_the_same(server, client, given, kind, value):
    for ask in (chat, complete):
        ask(client, extra_body=given)
        wanted = server.last_request().params.structured_outputs
        assert getattr(wanted, kind) == value and wanted.whitespace_pattern == given.get(
            "guided_whitespace_pattern"
        )


def test_fields_that_nobody_takes_are_logged_once_a_client(server, client, caplog):
    body = {
        "temprature": 0.5,
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "x",
        "prediction": {},
    }
    for _ in range(2):
        chat(
            client,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": False, "usage": True},
            extra_body=body,
            messages=[{"role": "user", "content": "a", "fooo": 1}],
            tools=[{"type": "function", "function": {"name": "f", "paramters": {}}}],
            tool_choice="none",
        ).close()
        complete(client, extra_body={"structured_outputs": {"regex": "a+", "whitespace": " "}})
    told = [m.split(": it is ignored")[0] for m in caplog.messages if "it is ignored" in m]
    assert sorted(told) == [
        "/v1/chat/completions takes no field 'messages[].fooo'",
        "/v1/chat/completions takes no field 'prediction'",
        "/v1/chat/completions takes no field 'stream_options.usage'",
        "/v1/chat/completions takes no field 'temprature'",
        "/v1/chat/completions takes no field 'tools[].function.paramters'",
        "/v1/completions takes no field 'structured_outputs.whitespace'",
    ]
    assert all("OpenAI/Python" in m for m in caplog.messages if "it is ignored" in m)
    server.json("/v1/completions", {"prompt": "a", "temprature": 1}, headers={"User-Agent": "another"})
    last = [m for m in caplog.messages if "it is ignored" in m][-1]
    assert "another" in last and "'temprature'" in last


def test_warnings_have_an_end(caplog):
    warnings = ClientWarnings()
    for i in range(MAX_WARNINGS + 50):
        warnings.warn(f"client {i}", "what", f"message {i}")
    told = [record for record in caplog.records if record.name == "shoal.server.http.client_warnings"]
    assert len(told) == MAX_WARNINGS + 1 and not warnings.is_new("one", "more")


def test_the_token_level_endpoint(server):
    body = {
        "token_ids": [1, 2, 3],
        "request_id": "r-1",
        "sampling_params": {"max_tokens": 5, "logprobs": 2, "temperature": 0.0},
        "priority": -1,
        "cache_salt": "s",
    }
    status, answer = server.json("/inference/v1/generate", body)
    assert (
        status == 200
        and answer["token_ids"] == ids_of("hello")
        and answer["request_id"] == "r-1"
        and answer["version"] == 1
    )
    assert (
        answer["finish_reason"] == "length"
        and len(answer["logprobs"]) == 5
        and answer["num_cached_tokens"] == 0
    )
    request = server.engine.seen[-1]
    assert (
        request.prompt_token_ids == [1, 2, 3]
        and not request.params.detokenize
        and (request.priority, request.cache_salt) == (-1, "s")
    )
    events = server.events("/inference/v1/generate", {**body, "stream": True})
    assert [i for e in events for i in e["token_ids"]] == ids_of("hello") and events[-1][
        "finish_reason"
    ] == "length"
    for wrong in (
        {"version": 2},
        {"token_ids": []},
        {"sampling_params": {"n": 2}},
        {"sampling_params": {"stop": ["a"]}},
    ):
        assert server.json("/inference/v1/generate", {**body, **wrong})[0] == 400, wrong


def test_request_ids_are_the_callers(server):
    _, headers, text = server.request("/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "mine"})
    assert headers["x-request-id"] == "mine" and json.loads(text)["id"] == "cmpl-mine"
    assert (
        server.json("/v1/completions", {"prompt": "a", "request_id": "two\nlines"})[1]["id"]
        == "cmpl-two\nlines"
    )


def test_ids_alone_are_served_without_a_tokenizer():
    with FakeServer(model={"tokenizer": None}) as server:
        status, answer = server.json(
            "/v1/completions", {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
        )
        assert (
            status == 200
            and answer["choices"][0]["token_ids"] == ids_of("hel")
            and answer["choices"][0]["text"] == ""
        )
        for path, body in (
            ("/v1/completions", {"prompt": "text"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/completions", {"prompt": [1], "stop": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            assert server.json(path, body)[0] == 400, path


def test_embeddings_of_a_conversation(server):
    """Regression: `messages` was a 400, and vLLM takes a conversation in place of `input`."""
    messages = [{"role": "user", "content": "The cat sat."}, {"role": "assistant", "content": "It did."}]
    ids = server.json("/tokenize", {"messages": messages, "add_generation_prompt": False})[1]["tokens"]
    wanted = server.json("/v1/embeddings", {"input": ids})[1]
    assert server.json("/v1/embeddings", {"messages": messages})[1] == wanted
    generates = server.json("/v1/embeddings", {"messages": messages, "add_generation_prompt": True})[1]
    assert generates["usage"]["prompt_tokens"] > wanted["usage"]["prompt_tokens"]
    for wrong in ({}, {"messages": messages, "input": "x"}, {"messages": []}):
        status, found = server.json("/v1/embeddings", wrong)
        assert status == 400 and found["error"]["param"] in ("input", "messages")


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.mark.parametrize(
    "old, new",
    [
        ({"guided_grammar": 'start: "yes" | "no"'}, {"grammar": 'start: "yes" | "no"'}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_regex": "yes|no"}, {"regex": "yes|no"}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA, "disable_any_whitespace": False}),
    ],
)
def test_the_same_wish_in_old_and_new_spelling_is_one(server, old, new):
    """Regression: guidance writes each grammar for old and new servers, and that was a 400."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 20,
        **old,
        "structured_outputs": new,
    }
    assert server.json("/v1/chat/completions", body)[0] == 200
    status, found = server.json("/v1/chat/completions", {**body, "structured_outputs": {"regex": "other"}})
    assert status == 400 and "must not constrain the text in different ways" in found["error"]["message"]
