"""SmolLM2, the model a newcomer meets: the oracle's numbers on the dequantized weights, close ones from the
packed weights."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from shoal import LLM, SamplingParams
from shoal.weights.source import resolve
from tests import tiny

ROOT = Path(__file__).parents[2]
TEXT = (
    "Water is a chemical compound of hydrogen and oxygen. At sea level it boils at one hundred degrees "
    "Celsius, and ice floats on it, "
    "because ice is less dense. Without water no form of life that we know of would be possible, and rivers "
    "have drawn people to "
    "their banks."
)
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def oracle():
    file = resolve("smollm2").path
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


def prompt_logprobs(llm, ids):
    found = llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    )[0].prompt_logprobs
    return torch.tensor([found[i][ids[i]].logprob for i in range(1, len(ids))])


@torch.no_grad()
def oracle_logprobs(oracle, ids):
    rows = oracle(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.slow
def test_float32_gives_the_oracles_tokens_and_numbers(oracle):
    with LLM("smollm2", dtype="float32", max_model_len=512) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        assert (prompt_logprobs(llm, ids) - oracle_logprobs(oracle, ids)).abs().max() < 2e-3
        prompts = [ids[:n] for n in (1, 5, 17, 40, len(ids))]
        for prompt, output in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)):
            want = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=1.0
            )
            assert output.outputs[0].token_ids == want[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_packed_weights_stay_close_to_the_oracle(oracle):
    """bf16 is 0.037 off in the mean on a paragraph; a forgotten un-permute of q and k 1.58."""
    with LLM("smollm2", max_model_len=512) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        error = (prompt_logprobs(llm, ids) - oracle_logprobs(oracle, ids)).abs()
        assert error.mean() < 0.02 and error.max() < 0.2


def test_it_chats():
    with LLM(max_model_len=512) as llm:
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)[0].outputs[
            0
        ]
        assert "Paris" in answer.text and answer.finish_reason in ("stop", "length")


def test_it_samples_as_its_card_advises_unless_told_otherwise():
    with LLM("smollm2", max_model_len=512) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p) == (0.2, 0.9)
        assert (params.repetition_penalty, params.max_tokens) == (1.1, 1000)
    assert SamplingParams().temperature == 1.0


def test_the_chat_pages_suggestions_are_answered_to_the_end():
    """Regression: answers to the page's own suggestions repeated themselves until the context was full."""
    page = (ROOT / "shoal/server/pages/chat.html").read_text()
    questions = re.findall(
        r"<button>([^<]+)</button>", page.partition('id="empty"')[2].partition("</main>")[0]
    )
    assert len(questions) == 3
    with LLM("smollm2") as llm:
        params = llm.get_default_sampling_params()
        params.seed = 1
        answers = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    assert [answer.outputs[0].finish_reason for answer in answers] == ["stop"] * 3


def test_it_makes_room_for_another_model_and_comes_back(tmp_path):
    """From packed weights of a file to a folder of plain ones, and back."""
    tiny_model = tiny.write_model(tmp_path, "llama")
    options = dict(max_model_len=256, kv_cache_memory_bytes=32 << 20, enable_sleep_mode=True)
    messages = [{"role": "user", "content": "What is water?"}]
    prompt = list(range(40))
    with LLM("smollm2", **options) as llm:
        [first] = llm.chat(messages, GREEDY)
        llm.sleep(level=2)
        llm.update_weights(tiny_model)
        llm.wake_up()
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        [answer] = llm.generate([prompt], greedy)
        with LLM(str(tiny_model), **options) as fresh:
            assert answer.outputs[0].token_ids == fresh.generate([prompt], greedy)[0].outputs[0].token_ids
        llm.sleep(level=2)
        llm.update_weights("smollm2")
        llm.wake_up()
        [again] = llm.chat(messages, GREEDY)
        assert again.prompt_token_ids == first.prompt_token_ids
        assert again.outputs[0].text == first.outputs[0].text and llm.config.keep_quantized
