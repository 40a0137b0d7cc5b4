"""One step of policy optimisation on rollouts that share prefixes: packed as trees, and unpacked.

    python examples/rollouts.py
    python examples/rollouts.py --prompt 512 --branches 4 4 --turn 64    on a GPU, say

Each prompt is continued by several first turns, and each of these by several second ones, and so on.
Prints the tokens that the trees save, how long a step takes, and by how much the gradients differ.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flashproto import nn
from flashproto.integrations import trees

VOCABULARY = 256
SHAPES = [name for name, config in nn.PRESETS.items() if config.window is None]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompts", type=int, default=2, help="prompts, which share nothing")
    add("--prompt", type=int, default=64, help="tokens of a prompt")
    add("--branches", type=int, nargs="+", default=[3, 2], help="turns behind each, at each depth")
    add("--turn", type=int, default=12, help="most tokens of a turn")
    add("--preset", default="toy", choices=SHAPES, help="the model's shape")
    options = parser.parse_args(arguments)
    numbers = {"prompts": [options.prompts], "prompt": [options.prompt], "turn": [options.turn]}
    for name, given in (numbers | {"branches": options.branches}).items():
        if min(given) < 1:
            parser.error(f"--{name} is {min(given)}; it takes at least 1")
    return options


def sample(options: argparse.Namespace) -> list[list[int]]:
    """Rollouts of random tokens; those of an agent come from its model."""
    rollouts = torch.randint(VOCABULARY, (options.prompts, options.prompt)).tolist()
    for n in options.branches:
        lengths = torch.randint(1, options.turn + 1, (len(rollouts) * n,)).tolist()
        before = [x for x in rollouts for _ in range(n)]
        turns = [torch.randint(VOCABULARY, (length,)).tolist() for length in lengths]
        rollouts = [x + turn for x, turn in zip(before, turns, strict=True)]
    return rollouts


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, answer: Tensor) -> Tensor:
    """The clipped objective of PPO, over the tokens of answers; all [R, L], advantages [R, 1]."""
    ratio = (logprobs - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(gain * answer).sum() / answer.sum()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    rollouts = sample(options)
    longest = max(map(len, rollouts))
    config = nn.GPTConfig.preset(options.preset, vocab_size=VOCABULARY, context=longest)
    model = nn.GPT(config, device=device)

    packed = trees.pack(rollouts, device=device)
    tokens = pad_sequence([torch.tensor(x) for x in rollouts], batch_first=True).to(device)

    def of_trees() -> Tensor:
        logits, _ = model(packed.tokens[None], mask=packed.mask, positions=packed.positions)
        return packed.by_rollout(packed.logprobs(logits))

    def of_rows() -> Tensor:
        logits, _ = model(tokens)
        found = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(found, (1, 0))

    place = torch.arange(longest, device=device)
    answer = (place >= options.prompt) & (place < packed.lengths[:, None])
    advantages = torch.randn(len(rollouts), 1, device=device)
    old = of_rows().detach() + 0.1 * torch.randn(len(rollouts), longest, device=device)

    def step(logprobs: Callable[[], Tensor]) -> tuple[list[Tensor], float]:
        start = time.perf_counter()
        loss = policy_loss(logprobs(), old, advantages, answer)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return list(gradients), time.perf_counter() - start

    for logprobs in (of_trees, of_rows):
        step(logprobs)  # the first one compiles kernels
    (got, packed_time), (want, time_of_rows) = step(of_trees), step(of_rows)
    scale = max(float(x.abs().max()) for x in want)
    difference = max(float((x - y).abs().max()) for x, y in zip(got, want, strict=True))
    print(packed)
    print(f"a step: {packed_time * 1e3:.1f} ms packed, {time_of_rows * 1e3:.1f} ms unpacked")
    print(f"largest gradient {scale:.3g}, largest difference {difference:.3g}")


if __name__ == "__main__":
    start.run(main)
