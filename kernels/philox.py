"""Random bits by Philox-4x32: what hooks and attention drop.

A call of Philox is a function of four counters and a key of 64 bits, the seed, and gives four words of
32 bits.  7 rounds are the fewest that pass every test of TestU01.
Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

import triton
import triton.language as tl


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """The four words of these counters, uint32 each."""
    return tl.philox(seed, c0, c1, c2, c3, 7)


@triton.jit
def kept(
    seed, head, i0, j0, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr
):
    """Which probabilities dropout keeps in the tile of BLOCK_M queries from i0 on and BLOCK_N keys from
    j0 on: [BM, BN], or [BN, BM] of ACROSS.  All four are multiples of 16.

    head: the number of the query head, of all batch entries or sequences.  A probability has 16 bits,
    and is dropped if they are less than `threshold`.

    The bits depend on head, query i and key j alone.  One call of Philox has those of 8 pairs, of the
    queries i and i + 8 and the keys j, j + 1, j + 8 and j + 9 of a square of 16 x 16: where tensor
    cores leave Q K^T one thread holds all of these, and of K Q^T half, so that a call is made once, or
    twice across.  A word of the four is for a query and two neighbouring keys, 16 bits each.
    """
    row = (i0 // 2 + tl.arange(0, BLOCK_M // 2)).to(tl.uint32)  # of 16 queries 8
    least = threshold.to(tl.uint32) << 16
    if ACROSS:
        half = tl.arange(0, BLOCK_N // 2)  # of 16 keys 8
        row, col = tl.broadcast(row[None, :], (j0 // 4 + half // 2).to(tl.uint32)[:, None])
        up = (16 - half % 2 * 16).to(tl.uint32)[:, None]  # brings a key's bits to the top
    else:
        col = (j0 // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)  # of 16 keys 4
        row, col = tl.broadcast(row[:, None], col[None, :])
    i0j0, i0j8, i8j0, i8j8 = philox(seed, col, row, row * 0 + head.to(tl.uint32), row * 0 + 1)
    words = tl.join(tl.join(i0j0, i8j0), tl.join(i0j8, i8j8))  # [.., .., queries, keys]
    if ACROSS:
        keep = tl.reshape(
            (words << up[:, :, None, None]) >= least, [BLOCK_N // 16, 8, BLOCK_M // 16, 8, 2, 2]
        )
        return tl.reshape(tl.permute(keep, 0, 5, 1, 2, 4, 3), [BLOCK_N, BLOCK_M])
    else:
        keep = tl.join((words << 16) >= least, words >= least)
        keep = tl.reshape(keep, [BLOCK_M // 16, 8, BLOCK_N // 16, 4, 2, 2, 2])
        return tl.reshape(tl.permute(keep, 0, 4, 1, 2, 5, 3, 6), [BLOCK_M, BLOCK_N])
