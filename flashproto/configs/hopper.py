"""What the choices for the forward and the backward kernel of kernels/hopper have in common.

Configurations are chosen among those that fit in registers and in 227 KiB of shared memory, by what
an H200 measured at 1024, 4096 and 16384 tokens (docs/hopper.md); lengths between go to the nearer side.
Triton's cache on disk knows a configuration by its fields alone: after a change of a property or of a
named barrier's number, empty it.
"""

from __future__ import annotations

from .attention import padded_head_dim

MULTIPROCESSORS = 132  # of an H200
L2_SHARE = 32 << 20  # bytes of L2 that the tiles of concurrent programs may take


def hopper_head_dim(head_dim: int) -> int:
    """The head dimension as the Hopper kernels see it."""
    return max(padded_head_dim(head_dim), 64)


def more_columns(head_dim: int, head_dim_v: int | None) -> int:
    """How many columns queries and keys have beside those of values, as the Hopper kernels see them:
    none or, where queries have 129 to 192 and values at most 128, 64 beside 128."""
    return 64 if head_dim_v is not None and head_dim_v <= 128 < head_dim <= 192 else 0


def even_groups(heads: int, fit: int) -> int:
    """About `fit` heads, such that groups of that size have no short last one."""
    return -(-heads // -(-heads // max(1, fit)))


def named_barriers(**counts: int) -> dict[str, int]:
    """The first number of each kind of named barrier, of which there are so many.

    A program has 16.  Triton's own come from the lowest numbers, these from the highest.
    """
    end, first = 16, {}
    for name, count in counts.items():
        end -= count
        first[name] = end
    return first
