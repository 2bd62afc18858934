"""`python -m tests.scripted_server FOLDER`: a server whose model writes given texts, for agents' loops.

FOLDER/script.json has the texts of one conversation: the first one answers a prompt without results of tools, the
next one a prompt with one result, and so on. A prompt without tools, such as a request for a title, gets TITLE.
FOLDER/prompts.jsonl gets each prompt, and FOLDER/port the server's port. It ends with its standard input.
"""

import json
import sys
from pathlib import Path

from shoal.fake_engine import FakeEngine
from tests.fake_server import byte_tokenizer, ids_of, tool_server

TITLE = "A short title"
# As TEMPLATE, with the texts of parts. Results have a mark of their own, by which they are counted.
TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}(thought: {{ m.reasoning_content }}){% endif %}
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


class ScriptedEngine(FakeEngine):
    """Answers as FOLDER/script.json says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(258, ends=True)
        self._folder = folder

    async def generate(self, request):
        prompt = byte_tokenizer().decode(request.prompt_token_ids, skip_special_tokens=False)
        with (self._folder / "prompts.jsonl").open("a") as log:
            log.write(json.dumps(prompt) + "\n")
        texts = json.loads((self._folder / "script.json").read_text())
        text = texts[min(prompt.count("<|tool|>"), len(texts) - 1)] if prompt.startswith("<tools>") else TITLE
        writer = FakeEngine(258, reply=ids_of(text), ends=True)
        async for output in writer.generate(request):
            yield output


def main() -> None:
    folder = Path(sys.argv[1])
    model = {"tokenizer": byte_tokenizer(TEMPLATE), "max_model_len": 2_000_000}
    server = tool_server(model=model, responses_store_bytes=4_000_000)
    server.engine = ScriptedEngine(folder)
    with server:
        (folder / "port.new").write_text(str(server.port))
        (folder / "port.new").rename(folder / "port")
        sys.stdin.read()


if __name__ == "__main__":
    main()
