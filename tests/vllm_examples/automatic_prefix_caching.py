"""Two questions on one long table: the second is answered from the first one's cache
(after vLLM's features/automatic_prefix_caching/automatic_prefix_caching_offline.py)."""

import sys
import time

from shoal import LLM, SamplingParams

TABLE = "| ID | Name | Age |\n|----|------|-----|\n" + "".join(
    f"| {i} | Person {i} | {20 + i} |\n" for i in range(20)
)


def ask(llm, question):
    start = time.time()
    [output] = llm.generate(TABLE + question, sampling_params=SamplingParams(temperature=0, max_tokens=16))
    print(
        f"{output.num_cached_tokens} tokens cached, {time.time() - start:.2f} s: {output.outputs[0].text!r}"
    )
    return output


def main():
    llm = LLM(model=sys.argv[1], enable_prefix_caching=True)
    first, second = (ask(llm, f"Question: how old is Person {i}? The age of Person {i} is ") for i in (3, 17))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens > len(second.prompt_token_ids) // 2


if __name__ == "__main__":
    main()
