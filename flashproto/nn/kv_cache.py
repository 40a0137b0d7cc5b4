"""A model's cache of keys and values: its memory, its lengths, and its pages.

Legend: B sequences, S tokens, Hq and Hkv heads, D head_dim; a layer's keys [B, room, Hkv, D], or
[pages, page_size, Hkv, D].
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import functional as F
from ..checks.errors import described, refuse
from ..checks.options import check_integer, is_integer
from ..checks.reading import is_readable
from ..checks.tensors import FLOATS

EIGHT_BITS = torch.float8_e4m3fn


class KVCache:
    """Keys and values of all layers of a model for B sequences, with room for a number of tokens each.

    nn.GPT takes one as cache=, and makes one: model.make_cache(batch, room).  A model of your own gives
    cache.layers[i] to its nn.Attention or nn.TransformerBlock number i, and calls advance() behind the
    last one.  A call puts the keys of its tokens behind those that are there, and attends.

    The cache counts on the host too.  More tokens than there is room for are an error before anything
    is launched: on a GPU the launch would write over other memory.  A layer with a window keeps
    its window and `chunk` tokens alone, in a row that new keys go round in.  The other layers have
    rows of `room` tokens, or pages, which they share: the cache hands pages out as sequences
    grow, and takes them back.  Memory is left as it is found: nothing reads what no token has written.

    Args:
        batch: the sequences.  room: the tokens of each of them.
        n_layers, n_kv_heads, head_dim: of the model.
        windows: of each layer how many tokens before itself a token sees, None for all; None: no layer
            has a window.
        chunk: the most tokens of a sequence in one call, where a layer has a window of less than
            room - chunk tokens.
        page_size: the tokens of a page, None for rows.  pages: how many there are; by default as many
            as all sequences can take.
        dtype: of the memory.  float8_e4m3fn keeps a scale for each token and head beside it.  Another
            float than the model's is what attention is then computed in.
        device: of the memory.

    lengths is int32 [B] on the device, counts the same as a list of integers, and gib the memory that
    all of it takes, in GiB.

    Raises: ValueError, TypeError: an argument does not fit; torch.OutOfMemoryError: that much memory
    cannot be had.

    Example:
        >>> layer, tables = nn.Attention(64, n_heads=4), nn.rope_tables(32, 16)
        >>> cache = nn.KVCache(batch=2, room=32, n_layers=1, n_kv_heads=4, head_dim=16)
        >>> x, parts = torch.randn(2, 8, 64), []
        >>> with torch.no_grad():
        ...     for part in x.split([5, 1, 2], dim=1):  # a prompt of 5 tokens, then 1, then 2
        ...         parts.append(layer(part, tables, cache=cache.layers[0]))
        ...         cache.advance()
        >>> torch.allclose(torch.cat(parts, 1), layer(x, tables), atol=1e-5), cache.counts
        (True, [8, 8])
    """

    def __init__(
        self,
        batch: int,
        room: int,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        windows: Sequence[int | None] | None = None,
        chunk: int = 512,
        page_size: int | None = None,
        pages: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        sizes: dict[str, int | None] = {
            "batch": batch,
            "room": room,
            "n_layers": n_layers,
            "n_kv_heads": n_kv_heads,
        }
        sizes |= {"head_dim": head_dim, "chunk": chunk, "page_size": page_size, "pages": pages}
        for name, size in sizes.items():
            if size is not None or name not in ("page_size", "pages"):
                low = 0 if name in ("batch", "n_layers") else 1
                takes = f"an integer of at least {low}"
                sizes[name] = check_integer("KVCache", name, size, low, sys.maxsize, takes, "Pass one.")
        batch, room, n_layers, n_kv_heads, head_dim, chunk, page_size, pages = cast(Any, sizes.values())
        if not isinstance(dtype, torch.dtype) or dtype not in (*FLOATS, EIGHT_BITS):
            takes = "float16, bfloat16, float32, float64 or float8_e4m3fn"
            refuse("KVCache", "dtype", described(dtype), takes, "Pass torch.bfloat16, say.", TypeError)
        takes, do = f"one for each of {n_layers} layers", "Pass None for a layer without."
        if windows is not None and not isinstance(windows, Iterable):
            refuse("KVCache", "windows", described(windows), takes, do, TypeError)
        windows = [None] * n_layers if windows is None else list(windows)
        if len(windows) != n_layers:
            refuse("KVCache", "windows", f"of length {len(windows)}", takes, do)
        takes = "integers of 0 or more, or None"
        windows = [
            None if w is None else check_integer("KVCache", "windows", w, 0, sys.maxsize, takes, do)
            for w in windows
        ]
        if pages is not None and page_size is None:
            refuse("KVCache", "pages", pages, "None without page_size", "Pass page_size=16, say.")
        self.batch, self.room, self.chunk, self.page_size, self.dtype = (
            batch, room, chunk, page_size, dtype,
        )  # fmt: skip
        a_sequence = 0 if page_size is None else -(-room // page_size)
        self.pages = batch * a_sequence if pages is None else pages
        # Of each layer how many keys there are behind one another: None for pages.
        short = [None if w is None or w + chunk >= room else w for w in windows]
        self.rolls = any(w is not None for w in short)
        whole = (batch, room) if page_size is None else (self.pages, page_size)
        shapes = [(*((batch, w + chunk) if w is not None else whole), n_kv_heads) for w in short]
        eight = dtype == EIGHT_BITS
        a_key = 2 * (head_dim * dtype.itemsize + 4 * eight)
        self.nbytes = sum(a * b * c for a, b, c in shapes) * a_key
        self._described = f"{n_layers} layers of {n_kv_heads} heads of {head_dim}, {dtype}"

        self.page_table: Tensor | None = None
        self.ropes: dict[Any, Any] = {}  # GPT's tables for the positions in the room, of each kind
        self.decoder: tuple[Any, Any] = None, None  # GPT.generate's CUDA graphs, which read this memory
        self._new: int | list[int] | None = None  # tokens that reserve found room for
        torch.empty(0, device=device)  # a device that is not there is another error than the next
        try:
            with torch.inference_mode(False):  # whose tensors could not be written outside of it
                self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
                if page_size is not None:
                    self.page_table = torch.zeros(batch, a_sequence, dtype=torch.int32, device=device)
                self._layers: list[tuple[Any, ...]] = [
                    (
                        w,
                        None if w is not None else self.page_table,
                        *(torch.empty(*shape, head_dim, dtype=dtype, device=device) for _ in "kv"),
                        *(torch.empty(shape, device=device) if eight else None for _ in "kv"),
                    )
                    for w, shape in zip(short, shapes, strict=True)
                ]
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
            raise torch.OutOfMemoryError(
                f"{self!r} is memory that could not be had. Make batch, room or pages smaller, or pass "
                "dtype=torch.float8_e4m3fn."
            ) from error
        self.counts = [0] * batch
        self._written = [0] * batch  # that layers may have, since the last reset
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._free = list(reversed(range(self.pages)))

    @property
    def layers(self) -> list[KVLayer]:
        """What nn.Attention takes as cache=, of each layer."""
        return [KVLayer(self, *parts) for parts in self._layers]  # no circle, which would keep memory

    @property
    def gib(self) -> float:
        return self.nbytes / 2**30

    def __repr__(self) -> str:
        paged = "" if self.page_size is None else f", {self.pages} pages of {self.page_size}"
        return (
            f"KVCache({self.batch} x {self.room} tokens{paged}, {self._described}, {self.gib:.3g} GiB)"
        )

    @property
    def free_pages(self) -> int:
        return len(self._free)

    # --- tokens that come -------------------------------------------------------------------------

    @torch.compiler.disable
    def reserve(self, new: int | Sequence[int]) -> None:
        """See that there is room, and pages, for `new` tokens more of every sequence, or of each; an
        error otherwise, before anything is changed.  Layers do this by themselves.  Before a CUDA graph
        is captured it has to be called.

        Raises: ValueError: there is no room, or no page is left.
        """
        new = int(new) if is_integer(new) else integers("KVCache", "new", new)  # type: ignore[arg-type]
        if new == self._new:
            return
        each = [new] * self.batch if isinstance(new, int) else new
        if len(each) != self.batch:
            do = "Pass 0 for those without."
            refuse("KVCache", "new", f"of {len(each)} numbers", f"one for each of {self.batch}", do)
        for b, (count, n) in enumerate(zip(self.counts, each, strict=True)):
            if n < 0 or count + n > self.room:
                got = f"{n} tokens for sequence {b}, which has {count}"
                takes = f"at most {self.room - count}, for {self.room} in all"
                refuse("KVCache", "new", got, takes, "Make a longer cache, or reset it.")
            if self.rolls and n > self.chunk:
                got, takes = f"{n} tokens for sequence {b}", f"at most chunk, {self.chunk}"
                refuse("KVCache", "new", got, takes, "Pass the tokens in several calls.")
        counts = [count + n for count, n in zip(self.counts, each, strict=True)]
        if self.page_size is not None:
            self._hand_out(counts)
        self._new = new
        # Now, and not when they are counted: a call that fails on the way has written some of them.
        self._written = list(map(max, self._written, counts))

    def advance(self) -> None:
        """Count the tokens of the call that all layers have made now.

        While a CUDA graph is captured, this is left to replay().
        """
        if self._new is None:
            do = "Call it once, when all layers have had the tokens."
            refuse("KVCache.advance", "the number of new tokens", None, "a call before it", do)
        if isinstance(self._new, int):
            self.lengths += self._new
        else:
            self.lengths += torch.tensor(self._new, dtype=torch.int32).to(self.lengths.device)
        if not is_capturing(self.lengths):
            self._count()

    def replay(self, graph: Any, new: int = 1) -> None:
        """graph.replay(), where a CUDA graph holds a call with `new` tokens of each sequence and
        advance(): an error before it where there is no room, and counted behind it."""
        self.reserve(new)
        graph.replay()
        self._count()

    @torch.compiler.disable
    def _count(self) -> None:
        new, self._new = self._new, None
        each = [new] * self.batch if isinstance(new, int) else new or []
        self.counts = [count + n for count, n in zip(self.counts, each, strict=True)]

    # --- tokens that go ---------------------------------------------------------------------------

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first lengths[b] tokens of each sequence, and take back the pages of the others.

        Raises: ValueError: a sequence has fewer; or layers with windows have forgotten what those
        tokens see, which they have behind `chunk` tokens.
        """
        lengths = integers("KVCache.truncate", "lengths", lengths)
        if len(lengths) != self.batch:
            got, do = f"of {len(lengths)} numbers", "Pass how many to keep of each sequence."
            refuse("KVCache.truncate", "lengths", got, f"{self.batch} numbers", do)
        for b, (n, count, written) in enumerate(zip(lengths, self.counts, self._written, strict=True)):
            if not 0 <= n <= count:
                got, takes = f"{n} of sequence {b}", f"0 to the {count} that it has"
                refuse("KVCache.truncate", "lengths", got, takes, "Pass how many to keep.")
            if self.rolls and n and written - n > self.chunk:
                got = f"{n} of sequence {b}, which has had {written}"
                takes = f"0, or at least {written - self.chunk}: layers with windows forget"
                refuse("KVCache.truncate", "lengths", got, takes, "Reset it, and prefill again.")
        self.counts, self._new = lengths, None
        self._written = [w if n else 0 for n, w in zip(lengths, self._written, strict=True)]
        self._set_lengths()
        if self.page_size is not None:
            for own, n in zip(self._pages, lengths, strict=True):
                while len(own) > -(-n // self.page_size):
                    self._free.append(own.pop())

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Forget all tokens, or those of some sequences, and take back their pages."""
        gone = self._sequences("sequences", range(self.batch) if sequences is None else sequences)
        self.truncate([0 if b in gone else count for b, count in enumerate(self.counts)])

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Let the sequences `target` have what the sequences `source` have, in pages of their own.

        Raises: ValueError: a number that is no sequence, or twice a target; no page is left.
        """
        source, target = self._sequences("source", source), self._sequences("target", target)
        if len(source) != len(target) or len({*target}) != len(target):
            got, takes = described(target), f"{len(source)} sequences, each once"
            refuse("KVCache.copy", "target", got, takes, "Pass a target for each source.")
        counts = list(self.counts)
        for b, a in zip(target, source, strict=True):
            counts[b] = self.counts[a]
        index: tuple[Any, Any] = target, source
        if self.page_size is not None:
            # Not those beside, which reserve has handed out for tokens that have not come.
            rows = [self._pages[a][: -(-self.counts[a] // self.page_size)] for a in source]
            kept = sum(len(own) for b, own in enumerate(self._pages) if b not in target)
            self._check_pages(sum(map(len, rows)), self.pages - kept)
            for b in target:
                self._free += self._pages[b]
                self._pages[b] = []
            self._hand_out(counts)
            index = [p for b in target for p in self._pages[b]], [p for own in rows for p in own]
        for layer in self.layers:
            to, of = (target, source) if layer.page_table is None else index
            for x in layer.memory:
                bits = x.view(torch.uint8) if x.dtype == EIGHT_BITS else x
                bits[to] = bits[of]
        written = [self._written[a] for a in source]
        for b, w in zip(target, written, strict=True):
            self._written[b] = w
        self.counts, self._new = counts, None
        self._set_lengths()

    def _set_lengths(self) -> None:
        self.lengths.copy_(torch.tensor(self.counts, dtype=torch.int32))

    def _sequences(self, name: str, given: Sequence[int]) -> list[int]:
        given = integers("KVCache", name, given)
        if any(not 0 <= b < self.batch for b in given):
            takes = f"numbers from 0 to {self.batch - 1}"
            refuse("KVCache", name, described(given), takes, "Pass numbers of sequences.")
        return given

    # --- pages --------------------------------------------------------------------------------------

    def _hand_out(self, counts: Sequence[int]) -> None:
        """Pages for sequences of so many tokens: all of them, or none and an error."""
        size, table = self.page_size, self.page_table
        assert size is not None
        assert table is not None
        missing = [-(-n // size) - len(own) for n, own in zip(counts, self._pages, strict=True)]
        self._check_pages(sum(n for n in missing if n > 0), len(self._free))
        if not any(n > 0 for n in missing):
            return
        for own, n in zip(self._pages, missing, strict=True):
            own += [self._free.pop() for _ in range(n)]
        rows = [own + [0] * (table.shape[1] - len(own)) for own in self._pages]
        table.copy_(torch.tensor(rows, dtype=torch.int32))

    def _check_pages(self, needed: int, free: int) -> None:
        if needed > free:
            got, takes = f"{needed} pages more", f"the {free} of {self.pages} that are free"
            do = "Make a cache with more pages, or reset a sequence."
            refuse("KVCache", "the tokens' need", got, takes, do)


@dataclass(frozen=True, eq=False)
class KVLayer:
    """What one layer has of a KVCache.  window: how many tokens before itself a token may see; None,
    all.

    It is no tuple: what wraps a module (FSDP) may copy tensors that it finds in one.
    """

    cache: KVCache
    window: int | None
    page_table: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def memory(self) -> list[Tensor]:
        return [x for x in (self.k_cache, self.v_cache, self.k_scale, self.v_scale) if x is not None]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        window: Sequence[int | None] | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention of q [B, Hq, S, D] to what is cached and to k and v [B, Hkv, S, D], which are put
        there; or with cu_seqlens [1, Hq, T, D] and so on.  As flashproto.attention_with_kv_cache."""
        left = None if window is None else window[0]
        if self.window is not None and (left is None or left > self.window):
            takes = f"one of at most {self.window} to the left, which is what the layer's cache keeps"
            refuse("Attention", "window", described(window), takes, "Make the cache with its windows.")
        dtype = q.dtype
        if self.k_cache.dtype != EIGHT_BITS:
            q, k, v = (x.to(self.k_cache.dtype) for x in (q, k, v))
        if cu_seqlens is not None:
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        self._reserve(q, cu_seqlens)
        out: Any = F.attention_with_kv_cache(
            q,
            self.k_cache,
            self.v_cache,
            lengths=self.cache.lengths,
            k=k,
            v=v,
            page_table=self.page_table,
            cu_seqlens_q=cu_seqlens,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            window=window,
            **options,
        )
        out = out if cu_seqlens is None else out.transpose(0, 1)[None]
        return out.to(dtype)

    def _reserve(self, q: Tensor, cu_seqlens: Tensor | None) -> None:
        if is_compiling():  # the model has done it
            return
        if cu_seqlens is None:
            self.cache.reserve(q.shape[2])
        elif is_readable(cu_seqlens):
            self.cache.reserve(cu_seqlens.diff().tolist())
        elif not isinstance(new := self.cache._new, list) or sum(new) != q.shape[0]:
            got, takes = "on a GPU, where it is not read", "lengths that cache.reserve has been told"
            do = "Call cache.reserve(lengths of the new tokens) before the first layer."
            refuse("Attention", "cu_seqlens", got, takes, do)


def integers(name: str, argument: str, given: Any) -> list[int]:
    """A list of Python's integers, of any numbers that are some; a tensor is read."""
    given = given.tolist() if isinstance(given, Tensor) else given
    takes, do = "integers, one for a sequence", "Pass a list of them."
    if not isinstance(given, Iterable):
        refuse(name, argument, described(given), takes, do, TypeError)
    return [check_integer(name, argument, x, -sys.maxsize, sys.maxsize, takes, do) for x in given]


def is_capturing(x: Tensor) -> bool:
    """Whether launches on x's device go into a CUDA graph now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
