"""Masks as values: what a query may see, for the argument `mask` of the attention functions.

    from flashproto import masks

    mask = masks.causal() & masks.documents(ids)
    out = flashproto.attention(q, k, v, mask=mask)

`a & b` lets a query see what both let it see, `a | b` what one of them does, `~a` what a does not.  A
mask is a band around the diagonal, which is a few numbers, and for each key the interval of queries
that may see it, which is two vectors: nothing of size Sq x Sk.  Of any other one, kernels make a bit of
each pair and a table of tiles, once.  Tiles that no query sees are skipped, tiles that all see take no
mask.

Query i of Sq is at position i + Sk - Sq, so that the last query is at the last key (bottom-right).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .backends import is_dtensor
from .checks.calls import told
from .checks.errors import described, refuse
from .checks.options import check_flag, check_integer, is_integer
from .checks.reading import is_readable
from .mask_rules import (
    block_diffusion,
    boolean,
    chunks,
    dilated,
    from_function,
    global_tokens,
    neighbourhood,
)
from .mask_values import Band, Intervals, Lengths, Mask, Tables

LONGEST = 2**30 - 1  # the sum of two is within int32


# --- bands ------------------------------------------------------------------------------------------


@told
def causal(top_left: bool = False) -> Mask:
    """Query i sees the keys up to its position, i + Sk - Sq.

    Args:
        top_left: instead up to key i, as torch's is_causal.

    Raises: TypeError: top_left is no bool.

    Example:
        >>> masks.causal().visible(2, 3).int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    return Mask((Band(None, 0, 0, check_flag("masks.causal", "top_left", top_left)),))


@told
def window(left: int | None, right: int | None = 0, first: int = 0) -> Mask:
    """Query i sees the keys from its position - left to its position + right, both included.

    Args:
        left, right: integers of 0 or more; None, or 2^30 and more, for no bound (flash-attn's -1).
        first: the first keys of the sequence that stay in sight, as far as `right` lets them be seen
            (attention sinks of StreamingLLM).

    Raises: TypeError, ValueError: no integers of that range.

    Example:
        >>> masks.window(1).visible(3, 3).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    return Mask((window_band("masks.window", left, right, first),))


def window_band(operator: str, left: Any, right: Any, first: Any, argument: str = "") -> Band:
    """argument: what errors name, where left and right are given as one."""
    takes = "an integer from 0 to 2^30 - 1"
    first = check_integer(operator, "first", first, 0, LONGEST, takes, "Pass 0 for none.")

    def bound(side: str, x: Any) -> int | None:
        if x is None or (is_integer(x) and x > LONGEST):
            return None
        takes, do = "an integer of 0 or more, or None", "Pass None for no bound."
        return check_integer(operator, argument or side, x, 0, LONGEST, takes, do)

    left, right = bound("left", left), bound("right", right)
    return Band(left, right, first if left is not None else 0, False)


# --- intervals --------------------------------------------------------------------------------------


def check_vector(operator: str, name: str, x: object, shapes: str, least: int, most: int) -> Tensor:
    """A tensor of int32 or int64 with `least` to `most` dimensions."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        got = f"of dtype {x.dtype}" if isinstance(x, Tensor) else described(x)
        refuse(
            operator,
            name,
            got,
            f"an int32 or int64 tensor {shapes}",
            f"Call {name}.int()." if isinstance(x, Tensor) else "Make it a tensor.",
            TypeError,
        )
    if is_dtensor(x):
        refuse(operator, name, "a DTensor", "a plain tensor", f"Pass {name}.to_local().", TypeError)
    if not least <= x.ndim <= most:
        refuse(operator, name, f"of shape {list(x.shape)}", f"a tensor {shapes}", "Reshape it.")
    return x


FAR = 2**30  # more than there are queries, and the sum of two is within int32


def by_head(x: Tensor) -> Tensor:
    """[S], [B, S] or [B, H, S] as int32 [B | 1, H | 1, S]; numbers behind all queries, such as the
    largest of int64, stay behind them."""
    x = x[None] if x.ndim == 1 else x
    x = x[:, None] if x.ndim == 2 else x
    return x.clamp(-FAR, FAR).to(torch.int32)


def of_intervals(
    words: str, begin: Tensor, end: Tensor, by_position: bool = False, queries: int | None = None
) -> Mask:
    """A mask of copies of these vectors, which a backward may keep wherever the mask was made."""
    if is_compiling():
        begin, end = by_head(begin), by_head(end)
    else:
        with torch.inference_mode(False):
            begin, end = by_head(begin), by_head(end)
        begin.tables = Tables()  # type: ignore[attr-defined]
    return Mask(parts=(Intervals(words, begin, end, by_position, queries),))


@told
def documents(ids: Tensor, ids_k: Tensor | None = None) -> Mask:
    """A query sees the keys of its own document: sequences packed side by side.

    The mask is of the ids as they are now: where they are written to later, make another one.

    Args:
        ids: [S] or [B, S], int32 or int64: the document of each token.  A document is a run of equal
            ids: one that comes back later is another document.
        ids_k: [Sk] or [B, Sk], of the keys, where queries and keys are not the same tokens; then ids
            are of the queries, and of equal ids there is one run.

    Raises: TypeError, ValueError: no such tensors; on a CPU also ids of the queries with several runs.

    Example:
        >>> mask = masks.causal() & masks.documents(torch.tensor([0, 0, 1]))
        >>> mask.visible(3, 3).int().squeeze()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    name = "masks.documents"
    ids = check_vector(name, "ids", ids, "[S] or [B, S]", 1, 2)
    words = f"documents({described(ids)})"
    if ids_k is None:
        runs = (ids != ids.roll(1, -1)).cumsum(-1)  # from 0 or from 1 on
        begin = torch.searchsorted(runs, runs)
        end = torch.searchsorted(runs, runs, right=True)
    else:
        ids_k = check_vector(name, "ids_k", ids_k, "[Sk] or [B, Sk]", 1, 2)
        words = f"documents({described(ids)}, {described(ids_k)})"
        if ids.device != ids_k.device or ids.ndim != ids_k.ndim or ids.shape[:-1] != ids_k.shape[:-1]:
            refuse(
                name,
                "ids_k",
                f"of shape {list(ids_k.shape)} on {ids_k.device}",
                f"the batch and device of ids, of shape {list(ids.shape)} on {ids.device}",
                "Expand or move it.",
            )
        dtype = torch.promote_types(ids.dtype, ids_k.dtype)
        ids = ids.to(dtype)
        ordered, order = ids.sort(stable=True)
        if is_readable(ids):
            runs, distinct = (x.diff().ne(0).sum(-1) for x in (ids, ordered))
            if (runs != distinct).any():
                got, takes = "of an id with several runs", "one run of each id beside ids_k"
                refuse(name, "ids", got, takes, "Put equal ids side by side, or name them apart.")
        ids_k = ids_k.to(dtype).contiguous()
        low = torch.searchsorted(ordered, ids_k)
        high = torch.searchsorted(ordered, ids_k, right=True)
        order = torch.nn.functional.pad(order, (0, 1))  # there may be no query
        begin = order.gather(-1, low)
        end = begin + (high - low)
    return of_intervals(words, begin, end, queries=ids.shape[-1])


def check_lengths(operator: str, lengths: object) -> Tensor:
    """[B]; what a tokenizer makes, [B, S], is told apart."""
    if isinstance(lengths, Tensor) and lengths.ndim == 2:
        do = "Of an attention_mask with the padding behind pass attention_mask.sum(-1); "
        do += "for another one masks.boolean(attention_mask.bool()[:, None, None]) is the mask."
        refuse(operator, "lengths", f"of shape {list(lengths.shape)}", "[B], int32 or int64", do)
    return check_vector(operator, "lengths", lengths, "[B]", 1, 1)


@told
def padding(lengths: Tensor) -> Mask:
    """Every query of batch entry b sees the keys below lengths[b], which each call reads anew.

    Args:
        lengths: [B], int32 or int64.

    Raises: TypeError, ValueError: no such tensor.

    Example:
        >>> masks.padding(torch.tensor([3, 1])).visible(1, 3).int().squeeze()  # two prompts
        tensor([[1, 1, 1],
                [1, 0, 0]], dtype=torch.int32)
    """
    lengths = check_lengths("masks.padding", lengths)
    return Mask(parts=(Lengths(lengths[:, None], False),))


@told
def prefix(lengths: Tensor) -> Mask:
    """Every query of batch entry b sees the keys below lengths[b], which each call reads anew, and
    others up to its position (prefix-LM).

    Args:
        lengths: [B], int32 or int64.

    Raises: TypeError, ValueError: no such tensor.

    Example:
        >>> masks.prefix(torch.tensor([2])).visible(3, 3).int().squeeze()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """
    lengths = check_lengths("masks.prefix", lengths)
    return Mask(parts=(Lengths(lengths[:, None], True),))


@told
def tree(parents: Tensor, leave: Tensor | None = None) -> Mask:
    """A token sees itself and its ancestors: sequences that share prefixes, each prefix there once.

    Tokens are in depth-first order, so that those below token t, and it itself, are t ... leave[t] - 1.
    The mask is of the tensors as they are now: where they are written to later, make another one.

    Args:
        parents: tree(parents) takes [S] or [B, S], int32 or int64: the index of each token's parent, -1
            of one without.
        leave: tree(enter, leave) takes for each key the first position that sees it (itself) and the
            position behind the last one.

    With fewer queries than keys the queries are the last tokens.

    Raises: TypeError, ValueError: no such tensors; on a CPU also tokens that are not in this order.

    Example:
        >>> parents = torch.tensor([-1, 0, 0, 2])  # two branches, of one and two tokens, behind one
        >>> (masks.causal() & masks.tree(parents)).visible(4, 4).int().squeeze()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 0, 1, 0],
                [1, 0, 1, 1]], dtype=torch.int32)
    """
    name, enter = "masks.tree", parents
    if leave is None:
        parents = check_vector(name, "parents", parents, "[S] or [B, S]", 1, 2)
        words = f"tree({described(parents)})"
        S = parents.shape[-1]
        enter = torch.arange(S, device=parents.device).expand(parents.shape)
        leave = subtrees(parents.long(), enter + 1, "amax")
        if is_readable(parents):
            size = subtrees(parents.long(), torch.ones_like(enter), "sum")
            wrong = (parents >= enter) | (parents < -1) | (leave != enter + size)
            if wrong.any():
                t = int(wrong.nonzero()[0, -1])
                refuse(
                    name,
                    "parents",
                    f"not in depth-first order at token {t}",
                    "for each token an earlier one, or -1, and all below a token side by side",
                    "Put each branch behind its prefix before the next branch begins.",
                )
    else:
        enter = check_vector(name, "enter", enter, "[S], [B, S] or [B, H, S]", 1, 3)
        leave = check_vector(name, "leave", leave, "[S], [B, S] or [B, H, S]", 1, 3)
        words = f"tree({described(enter)}, {described(leave)})"
        check_pair(name, "enter", enter, "leave", leave)
    return of_intervals(words, enter, leave, by_position=True)


def subtrees(parents: Tensor, values: Tensor, reduce: str) -> Tensor:
    """The reduction of `values` [..., S] over each token and all below it, in log2(S) steps: after step
    n over those that are less than 2^n below it.  More steps change nothing."""
    S = parents.shape[-1]
    # One more token, above all: what goes up from a root ends there.
    ancestors = torch.nn.functional.pad(parents, (0, 1), value=-1)
    ancestors = torch.where((ancestors < 0) | (ancestors > S), S, ancestors)
    made = torch.nn.functional.pad(values, (0, 1))
    for _ in range(steps_for(S)):
        made = made.scatter_reduce(-1, ancestors, made, reduce)
        ancestors = ancestors.gather(-1, ancestors)
    return made[..., :S]


def steps_for(S: int) -> int:
    """n with 2^n >= S; where S is a symbol of torch.compile, which it shall not fix, for any S."""
    if not is_compiling():
        return max(int(S) - 1, 0).bit_length()
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    for n in range(FAR.bit_length()):
        if statically_known_true(2**n >= S):
            return n
    return FAR.bit_length()


@told
def intervals(begin: Tensor, end: Tensor) -> Mask:
    """Key j is seen by the queries begin[j] ... end[j] - 1, counted by their rows.

    The mask is of the tensors as they are now: where they are written to later, make another one.

    Args:
        begin, end: [Sk], [B, Sk] or [B | 1, Hq | 1, Sk], int32 or int64.

    Raises: TypeError, ValueError: no such tensors.

    Example:
        >>> mask = masks.intervals(torch.arange(3), torch.full((3,), 3))
        >>> torch.equal(mask.visible(3, 3).squeeze(), masks.causal().visible(3, 3).squeeze())
        True
    """
    name = "masks.intervals"
    begin = check_vector(name, "begin", begin, "[Sk], [B, Sk] or [B, H, Sk]", 1, 3)
    end = check_vector(name, "end", end, "[Sk], [B, Sk] or [B, H, Sk]", 1, 3)
    check_pair(name, "begin", begin, "end", end)
    words = f"intervals({described(begin)}, {described(end)})"
    return of_intervals(words, begin, end)


def check_pair(operator: str, name: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.shape != y.shape or x.device != y.device:
        refuse(
            operator,
            other,
            f"of shape {list(y.shape)} on {y.device}",
            f"the shape and device of {name}, {list(x.shape)} on {x.device}",
            "Expand or move it.",
        )


# --- to look at -------------------------------------------------------------------------------------


@told
def draw(mask: Mask, Sq: int, Sk: int, path: Any = None) -> Any:
    """A picture of a mask: queries down and keys across, from 0 on, dark where a query sees a key.

    Args:
        mask: a mask; of one with several batch entries or heads the first is drawn.
        Sq, Sk: the numbers of queries and keys.
        path: where to save the picture, None for nowhere.

    Returns: the matplotlib Figure.
    Raises: ImportError: without matplotlib (pip install matplotlib); ValueError: lengths that are not
        the mask's.

    Example:
        >>> figure = masks.draw(masks.window(7), 32, 32)  # path="window.png" saves it
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    for name, n in (("Sq", Sq), ("Sk", Sk)):
        check_integer("masks.draw", name, n, 1, LONGEST, "a positive integer", "Pass 32, say.")
    seen = check_mask("masks.draw", mask).visible(Sq, Sk)
    while seen.ndim > 2:
        seen = seen[0]
    figure = Figure(figsize=(0.4 + 2.6 * Sk / max(Sq, Sk), 0.7 + 2.6 * Sq / max(Sq, Sk)))
    axes = figure.add_subplot()
    axes.imshow(seen.cpu().numpy(), cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest")
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))
    figure.tight_layout()
    if path is not None:
        figure.savefig(path, dpi=100)
    return figure


def how_to_make(mask: object) -> str:
    """The mask that may have been meant by what is none."""
    if isinstance(mask, Tensor):
        if mask.is_floating_point():
            return "Pass bias= what is added to scores, or masks.boolean(x) of a boolean tensor."
        return "Pass masks.boolean(x) of a boolean tensor."
    if callable(mask):
        return "Pass masks.from_function(f) of a function of (b, h, i, j)."
    return "Pass masks.causal(), say."


def check_mask(operator: str, mask: object) -> Mask:
    """A Mask."""
    if not isinstance(mask, Mask):
        refuse(
            operator,
            "mask",
            described(mask),
            "a mask of flashproto.masks, or None",
            how_to_make(mask),
            TypeError,
        )
    return mask


def check_bands(operator: str, mask: object) -> Mask:
    """A mask of sequences side by side: bands aligned bottom-right."""
    found = check_mask(operator, mask)
    if found.parts or found.rule is not None or any(band.top_left for band in found.bands):
        refuse(
            operator,
            "mask",
            repr(found),
            "bands aligned bottom-right: causal() and window(...)",
            "Sequences are documents already; pass attention one sequence of all for others.",
        )
    return found


def check_without_rule(operator: str, mask: object) -> None:
    """A mask of bands and intervals."""
    found = check_mask(operator, mask)
    if found.rule is not None:
        takes = "bands and intervals: causal(), window(...), documents(ids) and so on, joined by &"
        refuse(operator, "mask", str(found.rule), takes, "Call attention on the whole sequence.")


__all__ = [
    "Mask",
    "block_diffusion",
    "boolean",
    "causal",
    "chunks",
    "dilated",
    "documents",
    "draw",
    "from_function",
    "global_tokens",
    "intervals",
    "neighbourhood",
    "padding",
    "prefix",
    "tree",
    "window",
]
