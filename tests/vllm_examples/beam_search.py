"""Beam search over texts and token ids (the API of vLLM's LLM.beam_search)."""

import sys

from shoal import LLM, TextPrompt, TokensPrompt
from shoal.sampling_params import BeamSearchParams


def main():
    llm = LLM(model=sys.argv[1])
    ids = llm.get_tokenizer().encode("Water boils at")
    prompts = [TextPrompt(prompt="The capital of France is"), TokensPrompt(prompt_token_ids=ids)]
    for output in llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8)):
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:.3f} {sequence.text!r} ({len(sequence.tokens)} tokens)")


if __name__ == "__main__":
    main()
