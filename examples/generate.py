"""Sample text from a model that train_gpt.py or transformers wrote, and print it as it comes; then what
it took.

    python examples/generate.py                            the newest run under runs/
    python examples/generate.py --run runs/gpt-1 --prompt "The " --tokens 500 --temperature 0.7
    python examples/generate.py --prompt "The " --prompt "A " --samples 3    six texts, drawn together
    python examples/generate.py --run gpt2                 a folder in transformers' layout

Exit codes: 0, 2 for bad input, or 130 when stopped by Ctrl-C.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start

import argparse
import sys
from pathlib import Path

import checkpoint
from errors import EXPECTED, OptionError, tell
from pretrained_folder import is_pretrained, vocabulary_in
from run_folder import newest_folder, no_run
from sampling import Screen, stream
from settings import (
    OneLineParser,
    check_backend,
    check_device,
    integer_seed,
    not_negative,
    positive,
    share,
)
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
    prompt = "text to continue (a newline, where the model knows it); once more for another one"
    add("--prompt", action="append", help=prompt, metavar="TEXT")
    add("--samples", type=positive(int), default=1, help="texts for each prompt (1)", metavar="N")
    add("--tokens", type=not_negative(int), default=500, help="how many to add (500)", metavar="N")
    add("--temperature", type=not_negative(float), default=0.8, help="0 is greedy (0.8)", metavar="X")
    add("--top-k", type=positive(int), help="sample among the N likeliest (all)", metavar="N")
    add("--top-p", type=share, help="among the likeliest that have this share", metavar="X")
    add("--min-p", type=share, help="among those X times as likely as the likeliest", metavar="X")
    penalty = "divide logits of tokens that the text has by X (1)"
    add("--repetition-penalty", type=positive(float), default=1.0, help=penalty, metavar="X")
    lookup = "guess N tokens, up to 15, from what the text has, which may be faster (0)"
    add("--prompt-lookup", type=int, choices=range(16), default=0, help=lookup, metavar="N")
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
        return vocabulary.prompt(decoded(text, "--prompt"))
    ids = vocabulary.encode(vocabulary.codes(text, "--prompt"))
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
    model = GPT(config, impl=impl).eval()
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


def headed(prompt: str, b: int, texts: int) -> str:
    """A prompt, below the number of its text where there are several."""
    return prompt if texts == 1 else f"--- {b + 1} of {texts}\n{prompt}"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        folder = options.run or newest_folder(checkpoint.NAME, checkpoint.LATEST)
        if folder is None:
            raise no_run("--run")
        device = check_device(options.device)
        check_backend(options.impl, device)
        model, vocabulary, separator = open_model(Path(folder), device, options.impl)
        prompts = [vocabulary.opening()]
        if options.prompt is not None:
            prompts = [(prompt, encode_prompt(prompt, vocabulary)) for prompt in options.prompt]
        prompts = [x for x in prompts for _ in range(options.samples)]
        if isinstance(vocabulary, BPE) and any(prompt.endswith(" ") for prompt, _ in prompts):
            note = "note: --prompt ends with a space, and tokens of words begin with one; leave it out"
            print(note, file=sys.stderr)
        screen = Screen(
            vocabulary, [headed(prompt, b, len(prompts)) for b, (prompt, _) in enumerate(prompts)]
        )
        stream(
            model,
            [ids.to(device) for _, ids in prompts],
            options.tokens,
            options.seed,
            screen.add,
            separator,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            prompt_lookup=options.prompt_lookup,
        )
        screen.close()
        print(screen.speed(), file=sys.stderr)
        return 0
    except EXPECTED as error:
        return tell("generate.py", error)


if __name__ == "__main__":
    start.run(main)
