"""Answers many questions in one go: a file of JSON lines in, a file of JSON lines out.

    echo '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}' > questions.jsonl
    python examples/offline_batch.py questions.jsonl answers.jsonl --model Qwen/Qwen3-0.6B

Each line of the input is an object with `messages`, and may have an `id`. Without `--model` the small default
model answers. All requests are given to the engine at once, as it batches them better than any loop outside
could.
"""

import argparse
import json
from pathlib import Path

from shoal import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="smollm2", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--max-tokens", type=int, default=256)
    arguments = parser.parse_args()

    questions = [json.loads(line) for line in arguments.questions.read_text().splitlines() if line.strip()]
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    with LLM(arguments.model) as llm:
        outputs = llm.chat([question["messages"] for question in questions], params)
    with arguments.answers.open("w") as file:
        for number, (question, output) in enumerate(zip(questions, outputs)):
            answer = output.outputs[0]
            line = {
                "id": question.get("id", number),
                "answer": answer.text,
                "finish_reason": answer.finish_reason,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{len(questions)} answers in {arguments.answers}")


if __name__ == "__main__":
    main()
