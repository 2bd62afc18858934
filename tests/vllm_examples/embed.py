"""Embeddings (after vLLM's basic/offline_inference/embed.py)."""

from shoal import LLM, EngineArgs
from shoal.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["Hello, my name is", "The capital of France is"]


def parse_args():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="smollm2", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args):
    llm = LLM(**vars(args))
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS)):
        embedding = output.outputs.embedding
        print(f"{prompt!r}: [{embedding[0]:.4f}, {embedding[1]:.4f}, ...] (size={len(embedding)})")


if __name__ == "__main__":
    main(parse_args())
