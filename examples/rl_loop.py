"""A reinforcement-learning loop in which the trainer and the engine share one card.

    pip install transformers
    python examples/rl_loop.py Qwen/Qwen3-0.6B --steps 20

While one of them works, the other's memory is given back. The reward is a toy (answers that do not repeat
themselves) and the update is REINFORCE against the mean of a group; what matters is the order of sleep,
training, new weights and waking. The engine's cache is only taken again when the trainer's gradients are
gone, so that both are never there at once. It runs on the CPU as well.
"""

import argparse

import torch
import transformers

from shoal import LLM, SamplingParams

PROMPTS = ["The sea is", "A good day begins with", "In the old town there was", "The best way to learn is"]


def reward(token_ids: list[int]) -> float:
    """Returns the share of an answer's tokens that are different: 1 for an answer that repeats nothing."""
    return len(set(token_ids)) / len(token_ids)


def train(trainer: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list) -> float:
    """Makes answers that were better than their group's mean more likely. Returns the mean reward."""
    device = next(trainer.parameters()).device
    rewards = torch.tensor([[reward(answer.token_ids) for answer in group.outputs] for group in groups])
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    optimizer.zero_grad(set_to_none=True)
    for group, group_advantages in zip(groups, advantages):
        for answer, advantage in zip(group.outputs, group_advantages):
            ids = torch.tensor([[*group.prompt_token_ids, *answer.token_ids]], device=device)
            logprobs = trainer(ids).logits[0, :-1].float().log_softmax(-1)
            chosen = logprobs.gather(1, ids[0, 1:, None])[len(group.prompt_token_ids) - 1 :]
            (-advantage * chosen.mean() / rewards.numel()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a hub id of safetensors that transformers can train")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group-size", type=int, default=8, help="answers a prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.6,
        help="the engine's share of the card while it is awake",
    )
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    llm = LLM(
        arguments.model,
        enable_sleep_mode=True,
        max_model_len=512,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trainer = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=1e-3)
    params = SamplingParams(n=arguments.group_size, temperature=1.0, max_tokens=arguments.max_tokens)
    for step in range(arguments.steps):
        groups = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.sleep(level=2)  # weights and cache are dropped: both are replaced below
        trainer.to(device)
        mean = train(trainer, optimizer, groups)
        llm.wake_up(tags=["weights"])
        llm.update_weights_from_tensors(dict(trainer.named_parameters()))
        trainer.to("cpu")
        if device == "cuda":
            torch.cuda.empty_cache()  # the trainer's memory is free before the cache takes it
        llm.wake_up(tags=["kv_cache"])
        print(f"step {step}: mean reward {mean:.3f}, weights version {llm.weights_version}")
    llm.exit()


if __name__ == "__main__":
    main()
