"""One conversation, many at once, and with another template (after vLLM's basic/chat.py)."""

from shoal import LLM, EngineArgs
from shoal.outputs import RequestOutput
from shoal.utils.argparse_utils import FlexibleArgumentParser

CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]


def show(title: str, outputs: list[RequestOutput]):
    for output in outputs:
        print(f"{title}: {output.outputs[0].text!r} after {len(output.prompt_token_ids)} tokens")


def main(args):
    max_tokens, template_path = args.pop("max_tokens"), args.pop("chat_template_path")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = max_tokens
    show("one", llm.chat(CONVERSATION, sampling_params, use_tqdm=False))
    show("many", llm.chat([CONVERSATION] * 3, sampling_params, use_tqdm=True))
    show("unprompted", llm.chat(CONVERSATION, sampling_params, add_generation_prompt=False))
    if template_path is not None:
        with open(template_path) as file:
            show(
                "template",
                llm.chat([CONVERSATION], sampling_params, use_tqdm=False, chat_template=file.read()),
            )


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="smollm2")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--chat-template-path", type=str)
    main(vars(parser.parse_args()))
