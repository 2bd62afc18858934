"""Memory given back and taken again, with equal answers then (after vLLM's docs/features/sleep_mode.md)."""

import sys

from shoal import LLM, SamplingParams


def main():
    llm = LLM(model=sys.argv[1], enable_sleep_mode=True)
    params = SamplingParams(temperature=0, max_tokens=10)
    [before] = llm.generate("How are you?", params)
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    [after] = llm.generate("How are you?", params)
    assert after.outputs[0].text == before.outputs[0].text
    llm.reset_prefix_cache()
    print(repr(after.outputs[0].text))


if __name__ == "__main__":
    main()
