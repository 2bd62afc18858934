"""The real server over a fake engine, on a thread of this process and a free port of the loopback."""

import asyncio
import threading
from pathlib import Path

import uvicorn

from shoal.config import ServerConfig
from shoal.fake import FakeEngine
from shoal.server.app import create_app
from shoal.server.model import ServedModel
from shoal.tokenizer import Tokenizer
from tests.tiny import write_tokenizer

# A template as Qwen3's: it knows tools and thoughts.
TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}(thought: {{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


class Served:
    """`say` sets what every answer is; `prompt` tells what the engine was last asked."""

    def __init__(self, folder: Path, names=("tiny",), config=None, **options):
        write_tokenizer(folder)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.tokenizer.chat_templates = {"default": TEMPLATE}
        self.engine = FakeEngine(258, ends=True)
        self.names, self.config, self.options = list(names), config or ServerConfig(), options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=[self._run()])
        self._thread.start()
        assert self._ready.wait(60)

    async def _run(self):
        options = {"max_model_len": 4096, "vocab_size": 258, "max_num_seqs": 16, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        model = ServedModel(self.names, self.engine, self.tokenizer, eos_token_ids=(257,), **{**options, **self.options})
        server = uvicorn.Server(uvicorn.Config(create_app([model], self.config), port=0, log_level="warning", lifespan="off"))
        self._server = server
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        self._ready.set()
        await serving
        model.close()

    def say(self, text):
        self.engine.reply = self.tokenizer.encode(text, add_special_tokens=False)

    @property
    def request(self):
        return self.engine.seen[-1]

    @property
    def prompt(self):
        return self.tokenizer.decode(self.request.prompt_token_ids, skip_special_tokens=False)

    def close(self):
        self._server.should_exit = True
        self._thread.join(60)
