"""Tiles of the cross entropy kernels, chosen from the vocabulary and dtype alone, so that the loss of a
row does not depend on how many others there are.  itemsize: bytes of a logit."""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import power_of_two

# Bytes of neighbouring logits that a thread loads at once.
GROUP_BYTES = 16


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Tiles of `rows` rows as `groups` groups of `elements` neighbouring logits each.

    programs: programs a multiprocessor, where each takes several tiles.
    max_registers: a cap for the compiler, which otherwise spills a few to have one program more.
    """

    rows: int
    groups: int
    elements: int
    num_warps: int
    programs: int = 1
    max_registers: int | None = None

    @property
    def columns(self) -> int:
        return self.groups * self.elements


def _tile(
    V: int,
    itemsize: int,
    widest: int,
    num_warps: int,
    programs: int = 1,
    max_registers: int | None = None,
) -> CrossEntropyConfig:
    """Tiles of `widest` columns for num_warps warps; narrow vocabularies have several rows in one."""
    elements = GROUP_BYTES // itemsize
    columns = min(max(power_of_two(V), elements), widest)
    # Four warps are enough for rows that share a tile.
    per_warp = widest // num_warps
    rows = max(4 * per_warp // columns, 1) if columns >= V else 1
    warps = min(max(rows * columns // per_warp, 1), num_warps)
    if rows > 1:
        max_registers = 128
    return CrossEntropyConfig(rows, columns // elements, elements, warps, programs, max_registers)


def cross_entropy_forward(V: int, itemsize: int) -> CrossEntropyConfig:
    """Losses alone: many small programs, since no row is read twice."""
    return _tile(V, itemsize, 8192 // itemsize, 8)


def cross_entropy_forward_gradient(V: int, itemsize: int) -> CrossEntropyConfig:
    """Losses and gradient.  Each row is read a second time from cache, which has room for some 50 MB;
    so the longer rows are, the more warps share one."""
    if V * itemsize <= 16384:
        return _tile(V, itemsize, 16384 // itemsize, 16)
    if V * itemsize <= 131072:
        return _tile(V, itemsize, 16384 // itemsize, 8)
    return _tile(V, itemsize, 16384 // itemsize, 32, max_registers=64)


def cross_entropy_backward(V: int, itemsize: int) -> CrossEntropyConfig:
    """The gradient from the saved state."""
    return _tile(V, itemsize, 4096 // itemsize, 4, programs=32, max_registers=96)


@dataclass(frozen=True)
class StripConfig:
    """Strips of `length` elements in tiles of `tile`; programs a multiprocessor, or one for each
    strip."""

    length: int
    tile: int
    num_warps: int
    programs: int = 1


def cross_entropy_total() -> StripConfig:
    """Sums over rows: up to `length` of them are added by one program."""
    return StripConfig(32768, 4096, 16)


def gradient_scale(itemsize: int) -> StripConfig:
    """A tensor times a number, in place."""
    return StripConfig(8192 // itemsize, 8192 // itemsize, 4, 8)


# --- linear_cross_entropy ------------------------------------------------------------------------


def padded_classes(V: int) -> int:
    """Row stride of a buffer of logits: whole 128-byte lines, which suit products and kernels."""
    return -(-V // 64) * 64


def product_classes(V: int, itemsize: int) -> int:
    """Classes that a product for V classes takes.  In 16 bits they are up to 7 more, so that a row of
    logits is a multiple of 16 bytes: cuBLAS has only slow kernels for others.  In float32 all are as
    fast."""
    return -(-V // 8) * 8 if itemsize == 2 else V


def tokens_at_once(D: int, low_memory: bool) -> int:
    """Tokens, of D features, whose logits are held at once.

    As many tokens as there are features cost nothing: their logits are as large as weight's gradient,
    which is allocated after they are freed.  Products of fewer than 2816 tokens (22 tiles of 128, of
    which 132 multiprocessors take 6 columns at a time) are slow.
    """
    return max(D, 1408 if low_memory else 2816)


def classes_summed(V: int, low_memory: bool) -> int:
    """Classes whose rows of weight's gradient are summed over chunks of tokens, in float32.  Those of
    the others are one product over all tokens each, from logits that are computed a second time."""
    return padded_classes(-(-V // 2)) if low_memory and V > 64 else V


def classes_at_once(T: int, V: int, chunk_size: int) -> int:
    """Classes whose logits for all T tokens take the memory of chunk_size tokens and all classes."""
    parts = max(-(-T // chunk_size), 1)
    return min(padded_classes(-(-V // parts)), V)
