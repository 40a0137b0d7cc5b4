"""Sample text from a checkpoint that train_gpt.py wrote.

    python examples/generate.py                            the newest run under runs/
    python examples/generate.py --run runs/gpt-1 --prompt "The " --tokens 500 --temperature 0.7

Exit codes: 0, or 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import checkpoint
import torch
from checkpoint import CheckpointError
from run_log import newest_folder
from settings import OneLineParser, OptionError, integer_seed
from text_data import DataError, Vocabulary, code_points
from torch import Tensor

from flashproto import BackendError
from flashproto.backends import BACKENDS
from flashproto.nn import GPT


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = OneLineParser(
        "generate.py", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("--run", help="folder of the run (the newest under runs/)", metavar="FOLDER")
    p.add_argument("--prompt", default="\n", help="text to continue (a newline)", metavar="TEXT")
    p.add_argument("--tokens", type=int, default=500, help="how many to add (500)", metavar="N")
    p.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)", metavar="X")
    p.add_argument("--top-k", type=int, help="sample among the N likeliest (all)", metavar="N")
    p.add_argument("--seed", type=integer_seed, default=0, help="of the sampling (0)", metavar="N")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--impl", choices=BACKENDS, help="backend; hopper: of attention alone")
    return p.parse_args(argv)


def encode_prompt(prompt: str, vocabulary: Vocabulary) -> Tensor:
    """[1, S] ids; OptionError for an empty prompt or one with characters the model never saw."""
    if not prompt:
        raise OptionError("--prompt is empty; it takes at least one character. Leave it out.")
    ids = vocabulary.encode(code_points(prompt.encode(errors="surrogateescape"), vocabulary.level))
    if vocabulary.level == "char" and bool((ids == vocabulary.size - 1).any()):
        unseen = "".join(sorted({c for c in prompt if ord(c) not in vocabulary.symbols}))
        raise OptionError(
            f"--prompt has {unseen!r}; it takes characters of the text that the model was trained "
            "on. Leave those out."
        )
    return ids[None]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        folder = Path(options.run) if options.run else newest_folder("--run")
        tensors, facts = checkpoint.load(folder / checkpoint.NAME)
        config, vocabulary = checkpoint.model_parts(facts)
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device == "cuda" and not torch.cuda.is_available():
            raise OptionError("--device is 'cuda', and torch sees no GPU; it takes 'cpu' here.")
        model = GPT(config, impl=options.impl)
        checkpoint.restore_model(tensors, model)
        tokens = model.to(device).generate(
            encode_prompt(options.prompt, vocabulary).to(device), options.tokens,
            temperature=options.temperature, top_k=options.top_k,
            generator=torch.Generator(device).manual_seed(options.seed),
        )  # fmt: skip
    except (BackendError, CheckpointError, DataError, OptionError, ValueError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(vocabulary.decode(tokens[0].cpu()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
