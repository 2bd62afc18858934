"""Structured outputs on the default model and its real tokenizer (49152 tokens, many characters each)."""

import json
import re

from shoal import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_the_default_model_answers_as_it_is_asked():
    asked = [
        dict(json=SCHEMA, whitespace_pattern=" ?"),
        dict(regex="[A-Z][a-z]{2,8}, [0-9]{2}"),
        dict(choice=["positive", "negative"]),
        dict(grammar='root ::= "The answer is " [0-9]{1,3} "."'),
    ]
    params = [
        SamplingParams(
            max_tokens=60, seed=i, temperature=0.8, structured_outputs=StructuredOutputsParams(**given)
        )
        for i, given in enumerate(asked)
    ]
    with LLM(max_model_len=512) as llm:
        text = [
            o.outputs[0].text
            for o in llm.chat([[{"role": "user", "content": "Describe a person."}]] * 4, params)
        ]
    person = json.loads(text[0])
    assert list(person) == ["name", "age"] and len(person["name"]) <= 20 and 1 <= person["age"] <= 99
    assert re.fullmatch("[A-Z][a-z]{2,8}, [0-9]{2}", text[1])
    assert text[2] in ("positive", "negative")
    assert re.fullmatch(r"The answer is [0-9]{1,3}\.", text[3])


def test_a_grammar_takes_markers_of_the_default_model_that_are_special_tokens():
    asked = [
        (dict(choice=["<|im_start|>positive", "<|im_start|>negative"]), r"<\|im_start\|>(positive|negative)"),
        (dict(regex=r"<repo_name>[a-z]{2,5}<reponame>"), "<repo_name>[a-z]{2,5}<reponame>"),
        (dict(grammar='root ::= "<file_sep>" [0-9]{1,3} "."'), r"<file_sep>[0-9]{1,3}\."),
    ]
    params = [
        SamplingParams(
            max_tokens=30, skip_special_tokens=skips, structured_outputs=StructuredOutputsParams(**given)
        )
        for given, _ in asked
        for skips in (True, False)
    ]
    with LLM(max_model_len=512) as llm:
        tokenizer = llm.get_tokenizer()
        found = llm.chat([[{"role": "user", "content": "Describe a person."}]] * len(params), params)
    special = set(tokenizer.all_special_ids) - set(tokenizer.eos_token_ids)
    for i, output in enumerate(found):
        answer = output.outputs[0]
        assert re.fullmatch(asked[i // 2][1], answer.text), answer.text
        assert (i % 2 == 1) == bool(special.intersection(answer.token_ids))
