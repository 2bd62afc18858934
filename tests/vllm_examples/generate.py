"""Options from the command line, the model's own sampling defaults (after vLLM's basic/generate.py)."""

from shoal import LLM, EngineArgs
from shoal.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["Hello, my name is", "The capital of France is"]


def make_parser():
    parser = FlexibleArgumentParser()
    engine_group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(engine_group)
    engine_group.set_defaults(model="smollm2")
    sampling_group = parser.add_argument_group("Sampling parameters")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--temperature", type=float)
    sampling_group.add_argument("--top-p", type=float)
    sampling_group.add_argument("--top-k", type=int)
    return parser


def main(args):
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(sampling_params, name, value)
    for output in llm.generate(PROMPTS, sampling_params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({len(output.outputs[0].token_ids)} tokens)")


if __name__ == "__main__":
    main(vars(make_parser().parse_args()))
