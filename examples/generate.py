"""Sample text from a model that train_gpt.py or transformers wrote, and print it as it comes.

    python examples/generate.py                            the newest run under runs/
    python examples/generate.py --run runs/gpt-1 --prompt "The " --tokens 500 --temperature 0.7
    python examples/generate.py --run gpt2                 a folder in transformers' layout

Exit codes: 0, 2 for bad input, or 130 when stopped by Ctrl-C.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import argparse
from pathlib import Path

import checkpoint
import torch
from errors import EXPECTED, OptionError, tell
from pretrained_folder import is_pretrained, vocabulary_in
from run_folder import newest_folder, no_run
from sampling import show, stream
from settings import OneLineParser, check_backend, check_device, integer_seed, not_negative, positive
from torch import Tensor
from vocabulary import BPE, AnyVocabulary, Vocabulary, decoded

from flashproto.backends import BACKENDS
from flashproto.nn import GPT


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = OneLineParser(
        "generate.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add(
        "--run",
        help="a run's folder, a checkpoint in it, or a GPT-2 or Llama in transformers' layout (the "
        "newest run under runs/)",
        metavar="PATH",
    )
    add("--prompt", help="text to continue (a newline, where the model knows it)", metavar="TEXT")
    add("--tokens", type=not_negative(int), default=500, help="how many to add (500)", metavar="N")
    add("--temperature", type=not_negative(float), default=0.8, help="0 is greedy (0.8)", metavar="X")
    add("--top-k", type=positive(int), help="sample among the N likeliest (all)", metavar="N")
    add("--seed", type=integer_seed, default=0, help="of the sampling (0)", metavar="N")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda where there is a GPU")
    add("--impl", choices=BACKENDS, help="backend (the best that runs); hopper: of attention alone")
    return p.parse_args(argv)


def encode_prompt(prompt: str, vocabulary: AnyVocabulary) -> Tensor:
    """[S] ids; OptionError for an empty prompt or one with characters the model never saw."""
    if not prompt:
        raise OptionError("--prompt is empty; it takes at least one character. Leave it out.")
    text = prompt.encode(errors="surrogateescape")
    if isinstance(vocabulary, BPE):
        return vocabulary.prompt(decoded(text))
    ids = vocabulary.encode(vocabulary.codes(text))
    if isinstance(vocabulary, Vocabulary) and vocabulary.unseen(ids):
        unseen = "".join(sorted({c for c in prompt if ord(c) not in vocabulary.symbols}))
        raise OptionError(
            f"--prompt has {unseen!r}; it takes characters of the text that the model was trained "
            "on. Leave those out."
        )
    return ids


def open_model(run: Path, device: str, impl: str | None) -> tuple[GPT, AnyVocabulary, int | None]:
    """The model on its device, its vocabulary, and the id behind which it sees nothing of before."""
    if is_pretrained(run):
        model = GPT.from_pretrained(run, impl=impl, device=device)
        return model, vocabulary_in(run, model.config), None
    tensors, facts = load(run)
    config, vocabulary = checkpoint.model_parts(facts)
    model = GPT(config, impl=impl)
    checkpoint.restore_model(tensors, model)
    separator = vocabulary.end_of_text if facts["settings"].get("documents") else None
    return model.to(device), vocabulary, separator


def load(run: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors and the facts of the checkpoint of a run, or of a file in one."""
    if not (run / checkpoint.LATEST).is_file():
        return checkpoint.load(checkpoint.path_of(run))
    import sharded  # which takes a second

    saved = sharded.find(run)
    return saved.tensors(sharded.whole_tensors), saved.facts


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        folder = options.run or newest_folder(checkpoint.NAME, checkpoint.LATEST)
        if folder is None:
            raise no_run("--run")
        device = check_device(options.device)
        check_backend(options.impl, device)
        model, vocabulary, separator = open_model(Path(folder), device, options.impl)
        prompt, ids = vocabulary.opening()
        if options.prompt is not None:
            prompt, ids = options.prompt, encode_prompt(options.prompt, vocabulary)
        drawn = stream(
            model,
            ids.to(device),
            options.tokens,
            options.temperature,
            options.top_k,
            torch.Generator(device).manual_seed(options.seed),
            separator,
        )
        print(prompt, end="", flush=True)
        show(vocabulary.pieces(drawn))
        return 0
    except EXPECTED as error:
        return tell("generate.py", error)


if __name__ == "__main__":
    start.run(main)
