"""Answers many questions in one go: a file of JSON lines in, a file of JSON lines out.

    echo '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}' > questions.jsonl
    python examples/offline_batch.py questions.jsonl answers.jsonl --model Qwen/Qwen3-0.6B

Each line of the input is an object with `messages`, and may have an `id`. Without `--model` the small default
model answers. All requests are given to the engine at once, as it batches them better than any loop outside
could. It takes all or none, so a question that it would refuse is found before; its line has the error.
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

    questions = [line for line in arguments.questions.read_text("utf-8").split("\n") if line.strip()]
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    lines, prompts = [{"id": number} for number in range(len(questions))], []
    with LLM(arguments.model) as llm:
        for line, text in zip(lines, questions):
            try:
                question = json.loads(text)
                line["id"] = question.get("id", line["id"])
                prompt = llm.chat_prompt(question["messages"])
                if (count := len(prompt["prompt_token_ids"])) >= llm.config.max_model_len:
                    raise ValueError(f"{count} tokens fill the context of {llm.config.max_model_len}")
                prompts.append(prompt)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                line["error"] = f"{type(error).__name__}: {error}"
        outputs = iter(llm.generate(prompts, params))
    for line in lines:
        if "error" not in line:
            answer = next(outputs).outputs[0]
            line |= {"answer": answer.text, "finish_reason": answer.finish_reason}
    written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    arguments.answers.write_text(written, "utf-8")
    print(f"{len(prompts)} answers and {len(lines) - len(prompts)} errors in {arguments.answers}")


if __name__ == "__main__":
    main()
