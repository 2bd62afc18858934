"""A file of prompts becomes a file of answers, in batches (vLLM's batch_llm_inference.py without Ray)."""

import json
import sys
from pathlib import Path

from shoal import LLM, SamplingParams

BATCH_SIZE = 4


def main():
    model, source, result = sys.argv[1:4]
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    llm = LLM(model=model, enable_chunked_prefill=True, max_num_batched_tokens=512, max_model_len=512)
    params = SamplingParams(temperature=0.3, max_tokens=8)
    with open(result, "w") as file:
        for start in range(0, len(rows), BATCH_SIZE):
            batch = rows[start : start + BATCH_SIZE]
            chats = [
                [
                    {"role": "system", "content": "You are a bot that responds with haikus."},
                    {"role": "user", "content": row["text"]},
                ]
                for row in batch
            ]
            for row, output in zip(batch, llm.chat(chats, params)):
                file.write(
                    json.dumps(row | {"prompt": output.prompt, "answer": output.outputs[0].text}) + "\n"
                )


if __name__ == "__main__":
    main()
