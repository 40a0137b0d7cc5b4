"""Text from a model: prompts once, then token by token with a cache; see GPT.generate.

Legend: B sequences, n tokens of each in one call, V vocabulary.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import autocast_dtype
from ..checks.errors import refuse
from .kv_cache import KVCache
from .sampling import Sampling, sample

CAPTURING = threading.Lock()
WARM = 2  # steps that run as they are before one is captured

# --- tokens that are drawn ------------------------------------------------------------------------


class Decoder:
    """What drawing tokens needs, in memory that stays where it is.

    seeds, index: int64 [B], and how many tokens each sequence has drawn.  seen: bool [B, V], the tokens
    that it has, or None where that does not matter.
    """

    def __init__(self, seeds: Tensor, how: Sampling, vocabulary: int) -> None:
        self.how, self.seeds, self.index = how, seeds.clone(), torch.zeros_like(seeds)
        self.seen: Tensor | None = None
        if how.repetition_penalty != 1.0:
            self.seen = torch.zeros(len(seeds), vocabulary, dtype=torch.bool, device=seeds.device)
        self.steps: dict[int, Step] = {}

    def begin(self, seeds: Tensor, prompts: Sequence[Tensor]) -> None:
        self.seeds.copy_(seeds)
        self.index.zero_()
        if self.seen is not None:
            self.seen.zero_()
            for row, prompt in zip(self.seen, prompts, strict=True):
                row[prompt.long()] = True

    def step(self, n: int) -> Step:
        if n not in self.steps:
            self.steps[n] = Step(self.seeds, n)
        return self.steps[n]

    def draw(self, logits: Tensor, guesses: Tensor | None = None) -> Tensor:
        """[B, n] of logits [B, n, V], in which those behind the first follow a guess, [B, n - 1]."""
        n, seen = logits.shape[1], self.seen
        if seen is not None:
            each = [seen]
            for i in range(1, n):
                assert guesses is not None
                each.append(each[-1].scatter(1, guesses[:, i - 1 : i], True))
            seen = torch.stack(each, 1)
        index = self.index[:, None] + torch.arange(n, device=self.index.device)
        return sample(logits, self.seeds[:, None], index, self.how, seen)

    def take(self, drawn: Tensor, counts: Tensor | None) -> Tensor:
        """The last of the tokens [B, n] that are kept, [B, 1], of each sequence the first counts[b]."""
        last = drawn
        if counts is not None:
            is_kept = torch.arange(drawn.shape[1], device=drawn.device) < counts[:, None]
            last = drawn.gather(1, counts[:, None] - 1)
            drawn = torch.where(is_kept, drawn, last)
        self.index += 1 if counts is None else counts
        if self.seen is not None:
            self.seen.scatter_(1, drawn, True)
        return last


class Step:
    """n tokens of each sequence through the model, and what is drawn behind each of them.

    tokens [B, n] is what it reads, and drawn [B, n] what it writes, always the same memory: so a CUDA
    graph can be captured once and replayed.
    """

    def __init__(self, seeds: Tensor, n: int) -> None:
        B, device = len(seeds), seeds.device
        self.tokens = torch.zeros(B, n, dtype=torch.int64, device=device)
        self.drawn = torch.zeros_like(self.tokens)
        self.calls, self.graph = 0, None

    def __call__(self, decoder: Decoder, model: nn.Module, cache: KVCache, with_graph: bool) -> Tensor:
        def run() -> None:
            logits = model(self.tokens, cache=cache)[0]
            self.drawn.copy_(decoder.draw(logits, self.tokens[:, 1:]))

        if not with_graph:
            run()
            return self.drawn
        n, device = self.tokens.shape[1], self.tokens.device
        self.calls += 1
        if self.calls <= WARM:
            on_another_stream(device, run)
            return self.drawn
        cache.reserve(n)  # pages are handed out by the host: not in a graph
        if self.graph is None:
            self.graph = captured(device, run)
        cache.replay(self.graph, n)
        return self.drawn


class Lookup:
    """Guesses of a text's next tokens: those that came when it last had its last tokens.

    Source: Saxena, "Prompt Lookup Decoding" (2023).
    """

    LONGEST = 3  # tokens that are compared

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.behind: dict[tuple[int, ...], int] = {}  # of some tokens, where the text went on
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = len(self.tokens)
            for n in range(1, min(self.LONGEST, at) + 1):
                self.behind[tuple(self.tokens[at - n :])] = at
            self.tokens.append(token)

    def guess(self, n: int) -> list[int]:
        """n tokens, or none.  Where the text ends before, it goes on with the guess itself: a text that
        goes round is guessed to do so."""
        for length in range(min(self.LONGEST, len(self.tokens)), 0, -1):
            at = self.behind.get(tuple(self.tokens[-length:]))
            if at is not None:
                made = self.tokens[at : at + n]
                while len(made) < n:
                    made.append(made[at - len(self.tokens)])
                return made
        return []


class Texts:
    """The new tokens of each sequence.

    The host reads them only if something depends on them: a stop token, on_token, guesses.  ended:
    sequences that get no more of them.
    """

    def __init__(
        self,
        prompts: Sequence[Tensor],
        most: int,
        stop: set[int],
        on_token: Callable[[int, int], object] | None,
        lookup: int,
    ) -> None:
        self.prompts, self.most, self.stop, self.on_token = prompts, most, stop, on_token
        self.columns: list[Tensor] = []  # [B] each, not read
        self.rows: list[list[int]] = [[] for _ in prompts]  # read
        self.reads = bool(stop) or on_token is not None or lookup > 0
        self.lookups = [Lookup(x.tolist()) for x in prompts] if lookup else []
        self.ended: set[int] = set()

    @property
    def are_complete(self) -> bool:
        return len(self.ended) == len(self.prompts) or len(self.columns) == self.most

    def take(self, drawn: Tensor, guesses: Sequence[Sequence[int]]) -> list[int]:
        """How many of the tokens [B, n] each sequence keeps: those behind guesses that are right."""
        if not self.reads:
            self.columns.append(drawn[:, 0].clone())
            return [1] * len(self.prompts)
        counts = []
        for b, row in enumerate(drawn.tolist()):
            right = 0
            if guesses and b not in self.ended:
                while right < len(guesses[b]) and guesses[b][right] == row[right]:
                    right += 1
            counts.append(right + 1)
            if b not in self.ended:
                self._add(b, row[: right + 1])
        return counts

    def _add(self, b: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.rows[b].append(token)
            is_last = self.on_token is not None and self.on_token(b, token) is True
            if is_last or token in self.stop or len(self.rows[b]) == self.most:
                self.ended.add(b)
                break
        if self.lookups:
            self.lookups[b].add(tokens)

    def guesses(self, n: int) -> list[list[int]]:
        """n tokens for each sequence; none at all where no text says anything."""
        made = [[] if b in self.ended else x.guess(n) for b, x in enumerate(self.lookups)]
        return [x or [0] * n for x in made] if any(made) else []

    def new(self, b: int) -> Tensor:
        if self.reads:
            return self.prompts[b].new_tensor(self.rows[b])
        return torch.stack([column[b] for column in self.columns]).to(self.prompts[b].dtype)

    def tail(self, b: int, n: int) -> Tensor:
        """The last n tokens of prompt and text."""
        return torch.cat([self.prompts[b], self.new(b)])[-n:].long()


# --- from prompts to texts ------------------------------------------------------------------------


def generated(
    model: nn.Module,
    prompts: Sequence[Tensor],
    most: int,
    how: Sampling,
    *,
    vocabulary: int,
    stop: set[int],
    seeds: Tensor,
    lookup: int,
    on_token: Callable[[int, int], object] | None,
    cache: KVCache,
    cuda_graph: bool | None,
) -> list[Tensor]:
    """The new tokens of each prompt, up to `most` or one of `stop`."""
    cache.reset()
    with_graph = wants_graph(model, cache, cuda_graph)
    decoder = decoder_of(model, cache, how, vocabulary, seeds, with_graph)
    decoder.begin(seeds, prompts)
    texts, room = Texts(prompts, most, stop, on_token, lookup), cache.room
    guesses: list[list[int]] = []
    drawn = decoder.draw(prefill(model, cache, [x[-room:].long() for x in prompts])[:, None])
    while True:
        before, width = cache.counts, drawn.shape[1]
        had_ended = len(texts.ended)
        counts = texts.take(drawn, guesses)
        if texts.are_complete:
            return [texts.new(b) for b in range(len(prompts))]
        several = torch.tensor(counts, device=seeds.device) if width > 1 else None
        last = decoder.take(drawn, several)
        if width > 1:  # keys of wrong guesses go
            cache.truncate([n - width + kept for n, kept in zip(before, counts, strict=True)])
        # Sequences that have ended go on for nothing, in as little room as can be.
        longest = max((cache.counts[b] for b in texts.ended), default=0) + 1 + lookup
        if len(texts.ended) > had_ended or longest > min(room, cache.page_size or room):
            cache.reset(list(texts.ended))
        full = [b for b, n in enumerate(cache.counts) if n == room]
        guesses = []
        if full:  # their last halves are prompts now
            cache.reset(full)
            half = max(room // 2, 1)
            parts = [texts.tail(b, half) if b in full else last[b] for b in range(len(prompts))]
            drawn = decoder.draw(prefill(model, cache, parts)[:, None])
            continue
        if lookup and max(cache.counts) + 1 + lookup <= room:
            guesses = texts.guesses(lookup)
        step = decoder.step(1 + (lookup if guesses else 0))
        step.tokens[:, :1] = last
        if guesses:
            step.tokens[:, 1:] = torch.tensor(guesses, device=seeds.device)
        drawn = step(decoder, model, cache, with_graph)


def prefill(model: nn.Module, cache: KVCache, prompts: Sequence[Tensor]) -> Tensor:
    """The logits [B, V] behind each prompt, whose keys and values are cached; in several calls where
    layers with windows do not keep them all."""
    longest, logits = max(len(x) for x in prompts), None
    chunk = cache.chunk if cache.rolls else longest
    for begin in range(0, longest, chunk):
        parts = [x[begin : begin + chunk] for x in prompts]
        sizes = [len(x) for x in parts]
        options: dict[str, Any] = {"cache": cache, "return_logits": "last"}
        if len({*sizes}) == 1:
            tokens = torch.stack(parts)
        else:
            tokens = torch.cat(parts)[None]
            ends = torch.tensor([0, *sizes]).cumsum(0).to(tokens.device, torch.int32)
            options["cu_seqlens"] = ends
        made = model(tokens, **options)[0]
        if logits is not None:
            is_here = torch.tensor([n > 0 for n in sizes]).to(made.device)
            made = torch.where(is_here[:, None], made, logits)
        logits = made
    assert logits is not None
    return logits


# --- CUDA graphs ----------------------------------------------------------------------------------


def wants_graph(model: nn.Module, cache: KVCache, asked: bool | None) -> bool:
    """Whether steps are replayed; an error where that was asked for and cannot be."""
    if asked is False:
        return False
    reason = None
    if not cache.lengths.is_cuda:
        reason = f"tensors are on {cache.lengths.device}"
    elif autocast_dtype(cache.lengths) is not None:
        reason = "autocast is on, which keeps copies of parameters"
    elif any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        reason = "modules have hooks, which a replay would not call"
    elif any(type(p) not in (nn.Parameter, Tensor) for p in model.parameters()):
        reason = "parameters are not plain tensors"
    if reason is not None and asked:
        takes = f"None or False where {reason}"
        refuse("GPT.generate", "cuda_graph", True, takes, "Leave it out.")
    return reason is None


def decoder_of(
    model: nn.Module, cache: KVCache, how: Sampling, vocabulary: int, seeds: Tensor, with_graph: bool
) -> Decoder:
    """A new one, or the last one of this cache, with its graphs, if they are of the same calls and of
    these parameters, where they lie."""
    if not with_graph:
        return Decoder(seeds, how, vocabulary)
    tensors = [*model.parameters(), *model.buffers()]
    key = (id(model), model.training, how, vocabulary, *(x.data_ptr() for x in tensors))
    if cache.decoder[0] != key:
        cache.decoder = key, Decoder(seeds, how, vocabulary)
    return cache.decoder[1]


def on_another_stream(device: torch.device, run: Callable[[], None]) -> None:
    """run(), as calls before a capture have to: what they make once must not go into the graph."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)


def captured(device: torch.device, run: Callable[[], None]) -> Any:
    """A CUDA graph of run(), which is not executed.

    Other captures wait meanwhile, and so does Python's garbage collector: if it found another graph,
    say, what that does to the device would break this one.
    """
    with CAPTURING:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                run()
        finally:
            if collects:
                gc.enable()
    return graph
