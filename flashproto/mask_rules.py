"""Masks that are neither bands nor intervals: of a boolean tensor, of a function, and by rules; see
masks.py, whose names these functions are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .backends import is_dtensor
from .checks.calls import told
from .checks.errors import described, refuse
from .checks.options import check_integer, is_integer
from .mask_values import Blocks, Mask, Places, Rule, rule_of_tensor

LARGEST = 2**30 - 1


@told
def boolean(x: Tensor) -> Mask:
    """A query sees the keys where x is True.

    The first call makes bits of x and a table of its tiles, on x's device, in one pass.  They are kept
    as long as there is x, and made anew where x has been written to.

    Args:
        x: a boolean tensor of any strides whose shape broadcasts to [B, Hq, Sq, Sk].

    Raises: TypeError, ValueError: no such tensor.

    Example:
        >>> x = torch.tensor([[True, False], [False, True]])
        >>> (masks.boolean(x) | masks.causal()).visible(2, 2).int().squeeze()
        tensor([[1, 0],
                [1, 1]], dtype=torch.int32)
    """
    name = "masks.boolean"
    takes = "a boolean tensor that broadcasts to [B, Hq, Sq, Sk]"
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        got = f"of dtype {x.dtype}" if isinstance(x, Tensor) else described(x)
        refuse(name, "x", got, takes, "Pass x > 0, say.", TypeError)
    if is_dtensor(x):
        refuse(name, "x", "a DTensor", "a plain tensor", "Pass x.to_local().", TypeError)
    if not 1 <= x.ndim <= 4:
        refuse(name, "x", f"of shape {list(x.shape)}", takes, "Reshape it.")
    return Mask(rule=rule_of_tensor(x))


@told
def from_function(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """A query sees the keys for which a function says True.

    It is called with parts of all pairs, until each has been asked for, and bits are made of what it
    says: of Sq x Sk nothing else is in memory.  These are kept as long as the mask: make another mask
    when what the function reads has changed.

    Args:
        function: of batch entries b [B, 1, 1, 1], heads h [1, Hq, 1, 1], queries i [1, 1, n, 1] and
            keys j [1, 1, 1, m], int64 tensors of indices, i being counted by rows from 0 (as with
            masks.causal(top_left=True)); it returns a boolean tensor that broadcasts with these.  One
            that does not read b and h has one table for all.

    Raises: TypeError: no function, or one that returns another thing.

    Example:
        >>> mask = masks.from_function(lambda b, h, i, j: (i - j) % 2 == 0)
        >>> mask.visible(2, 4).int().squeeze()
        tensor([[1, 0, 1, 0],
                [0, 1, 0, 1]], dtype=torch.int32)
    """
    if not callable(function):
        takes = "a function of tensors (b, h, i, j)"
        do = "Pass lambda b, h, i, j: j <= i, say."
        refuse("masks.from_function", "function", described(function), takes, do, TypeError)
    if not is_dynamo_compiling():
        check_parameters(function)
    words = f"from_function({getattr(function, '__name__', type(function).__name__)})"
    return Mask(rule=Rule(words, functools.partial(by_function, function)))


def check_parameters(function: Callable[..., Any]) -> None:
    """It takes b, h, i and j."""
    try:
        parameters = inspect.signature(function)
    except ValueError:  # of what is written in C
        return
    try:
        parameters.bind(*"bhij")
    except TypeError:
        got, takes = f"one that takes {parameters}", "a function of four tensors (b, h, i, j)"
        do = "Pass lambda b, h, i, j: j <= i, say."
        refuse("masks.from_function", "function", got, takes, do, TypeError)


def by_function(function: Callable[..., Any], at: Places) -> Tensor:
    made = function(*at[:4])
    shape = [at.b.shape[0], at.h.shape[1], at.i.shape[2], at.j.shape[3]]
    good = isinstance(made, Tensor) and made.dtype == torch.bool
    if not good or any(a not in (1, b) for a, b in zip(made.shape[::-1], shape[::-1], strict=False)):
        got = f"one that returns {described(made)}"
        if isinstance(made, Tensor):
            got += f", {made.dtype}"
        takes = f"one that returns a boolean tensor that broadcasts to {shape}"
        do = "Compare tensors with ==, <= and so on, and join them by & and |."
        refuse("masks.from_function", "function", got, takes, do, TypeError)
    return made


@told
def chunks(size: int) -> Mask:
    """Tokens are cut into chunks, and a query sees the keys of its own: beside causal() the chunked
    attention of Llama 4.

    Args: size: of a chunk, 1 or more; the first one begins at position 0.
    Raises: TypeError, ValueError: no such number.

    Example:
        >>> masks.chunks(2).visible(3, 3).int().squeeze()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    return Mask(parts=(Blocks(whole("masks.chunks", "size", size), True),))


@told
def global_tokens(n: int) -> Mask:
    """The first n tokens see all, and are seen by all; beside a window, by |.

    Args: n: 1 or more.
    Raises: TypeError, ValueError: no such number.
    Source: Beltagy et al., "Longformer" (2020); Zaheer et al., "Big Bird" (2020).

    Example:
        >>> (masks.global_tokens(1) | masks.window(0)).visible(3, 3).int().squeeze()
        tensor([[1, 1, 1],
                [1, 1, 0],
                [1, 0, 1]], dtype=torch.int32)
    """
    return Mask(parts=(Blocks(whole("masks.global_tokens", "n", n), False),))


@told
def dilated(window: int, step: int) -> Mask:
    """A query sees its own key and every step-th before it.

    Args:
        window: the farthest key is at position - window or behind it, 0 or more.
        step: 1 or more; 1 is window(window).

    Raises: TypeError, ValueError: no such numbers.
    Source: Beltagy et al., "Longformer" (2020).

    Example:
        >>> masks.dilated(4, 2).visible(6, 6).int().squeeze()[5]
        tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32)
    """
    name = "masks.dilated"
    far = whole(name, "window", window, 0)
    step = whole(name, "step", step)
    return Mask(rule=Rule(f"dilated({far}, {step})", functools.partial(in_steps, far, step)))


def in_steps(window: int, step: int, at: Places) -> Tensor:
    distance = at.i + (at.Sk - at.Sq) - at.j
    return (distance >= 0) & (distance <= window) & (distance % step == 0)


@told
def block_diffusion(block: int) -> Mask:
    """Block diffusion's training: a noisy copy of a text and a clean one behind it, in blocks.

    A noisy token sees the noisy ones of its own block, and the clean ones of the blocks before.  A
    clean token sees the clean ones of its own block and of those before.

    Args: block: of how many tokens, 1 or more.  Sq = Sk is twice the length of the text.
    Raises: TypeError, ValueError: no such number; of other lengths, when they are known.
    Source: Arriola et al., "Block Diffusion" (2025, BD3-LM).

    Example:
        >>> masks.block_diffusion(1).visible(4, 4).int().squeeze()
        tensor([[1, 0, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    block = whole("masks.block_diffusion", "block", block)
    words = f"block_diffusion({block})"
    return Mask(rule=Rule(words, functools.partial(of_copies, block)))


def of_copies(block: int, at: Places) -> Tensor:
    if at.Sq != at.Sk or at.Sk % 2:
        got = f"block_diffusion({block}), for {at.Sq} queries and {at.Sk} keys"
        takes = "as many queries as keys, of two copies"
        refuse("masks", "mask", got, takes, "Pass the noisy copy and the clean one behind it.")
    half = at.Sk // 2
    clean_i, clean_j = at.i >= half, at.j >= half
    block_i, block_j = at.i % half // block, at.j % half // block
    own = (block_i == block_j) & (clean_i == clean_j)
    return own | (clean_j & (block_i > block_j))


@told
def neighbourhood(height: int, width: int, kernel: int | Sequence[int]) -> Mask:
    """Tokens are the places of a grid, row behind row, and a query sees those of a window around it.
    At the edges windows move inwards, so that all queries see as many keys (NATTEN).

    Args:
        height, width: of the grid, of Sq = Sk = height * width.
        kernel: how many rows and columns a window has: (rows, columns), or one number for both; of an
            even number there is one more before the query than behind it.

    Raises: TypeError, ValueError: no such numbers, or a window that is larger than the grid.
    Source: Hassani et al., "Neighborhood Attention Transformer" (2023).

    Example:
        >>> masks.neighbourhood(1, 5, (1, 3)).visible(5, 5).int().squeeze()
        tensor([[1, 1, 1, 0, 0],
                [1, 1, 1, 0, 0],
                [0, 1, 1, 1, 0],
                [0, 0, 1, 1, 1],
                [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    name = "masks.neighbourhood"
    height, width = (whole(name, n, x) for n, x in (("height", height), ("width", width)))
    both = kernel if isinstance(kernel, (tuple, list)) else (kernel, kernel)
    if len(both) != 2 or not all(is_integer(x) for x in both):
        takes, do = "an integer, or two: rows and columns", "Pass 7, say."
        refuse(name, "kernel", described(kernel), takes, do, TypeError)
    for x, most in zip(both, (height, width), strict=True):
        takes = f"from 1 to the grid's, {height} and {width}"
        check_integer(name, "kernel", x, 1, most, takes, "Pass a smaller window.")
    words = f"neighbourhood({height}, {width}, {tuple(map(int, both))})"
    seen = functools.partial(in_windows, (height, width), (int(both[0]), int(both[1])))
    return Mask(rule=Rule(words, seen, queries=height * width, keys=height * width))


def in_windows(grid: tuple[int, int], kernel: tuple[int, int], at: Places) -> Tensor:
    width = grid[1]
    query, key = (at.i // width, at.i % width), (at.j // width, at.j % width)
    seen = None
    for n, k, i, j in zip(grid, kernel, query, key, strict=True):
        start = (i - k // 2).clamp(0, n - k)
        inside = (start <= j) & (j < start + k)
        seen = inside if seen is None else seen & inside
    assert seen is not None
    return seen


def whole(operator: str, name: str, x: Any, least: int = 1) -> int:
    takes = f"an integer from {least} to 2^30 - 1"
    return check_integer(operator, name, x, least, LARGEST, takes, f"Pass {max(least, 4)}, say.")
