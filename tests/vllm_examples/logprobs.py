"""Log-probabilities of prompt and answer, by token."""

import sys

from shoal import LLM, SamplingParams, TokensPrompt


def main():
    llm = LLM(model=sys.argv[1], max_logprobs=30)
    ids = llm.get_tokenizer().encode("The capital of France is")
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate(TokensPrompt(prompt_token_ids=ids), params)
    completion = output.outputs[0]
    assert output.prompt_token_ids == ids and output.prompt_logprobs[0] is None
    for token_id, step in zip(ids[1:], output.prompt_logprobs[1:]):
        assert step[token_id].logprob <= 0 and len(step) in (2, 3)
    for token_id, step in zip(completion.token_ids, completion.logprobs):
        assert step[token_id].rank == 1 and len(step) == 3
        print(" ".join(f"{found.decoded_token!r}:{found.logprob:.3f}" for found in step.values()))
    assert (
        abs(
            sum(step[i].logprob for i, step in zip(completion.token_ids, completion.logprobs))
            - completion.cumulative_logprob
        )
        < 1e-4
    )


if __name__ == "__main__":
    main()
