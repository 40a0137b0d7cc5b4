"""Partial results of the programs that share a row, exchanged within one launch.

A row too wide for one program's registers is split over several.  Each reduces its tile, publishes
the partial result, waits for those of the others, and finishes its tile from registers.  So the row is
read once.  All join the same partial results in the same order: nothing depends on timing.

A partial result is two float32 packed into one 64-bit word.  The word is written and read whole, so no
fence is needed.  A word of 0 says "not there yet": words must be 0 before the launch, and two zeros are
published as -0.0 and 0.0.  A launch cannot clear its own words, because a late program may still want
them, but it can clear those of the launch before, for the launch after: see `clear`.

Programs of a row usually start together, but no GPU promises it, and the interpreter runs one program
after another.  So a program waits for a bounded time only; then it reduces the missing tiles itself.

Legend: word(s) int64; split the number of a tile in its row, of `splits` tiles; LANES a power of two,
at least `splits`.
"""

import triton
import triton.language as tl


@triton.jit
def pack(a, b):
    """Two float32 in an int64."""
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def unpack(word):
    """The two float32 of an int64."""
    a = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return a, word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def publish(words_ptr, split, word):
    """Make `word`, a scalar or [1], that of `split`."""
    if word.type.is_block():
        split += tl.arange(0, 1)
    tl.atomic_xchg(words_ptr + split, tl.where(word == 0, -(2**63), word), sem="relaxed")


@triton.jit
def clear(words_ptr, split):
    """Set the word of `split` back to 0, among words that an ended launch has used.

    A kernel that gets such words (used_ptr) clears all of them: for every word that a program
    publishes, it clears the same one there.  The next launch publishes there, and clears what this one
    published.
    """
    tl.store(words_ptr + split, 0)


@triton.jit
def collect(words_ptr, splits, LANES: tl.constexpr, POLLS: tl.constexpr, lanes=None):
    """Wait for all words of a row.  Returns them [LANES], and how many are missing after POLLS reads
    (at least one).

    The reads are atomic operations, which one thread makes for its whole program: a plain load may show
    different words to different warps, and send them different ways.

    lanes: 0 to LANES - 1, which Gluon wants with a layout.
    """
    if lanes is None:
        lanes = tl.arange(0, LANES)
    words, missing = poll_words(words_ptr, splits, lanes)
    polls = 1
    while (missing > 0) & (polls < POLLS):
        words, missing = poll_words(words_ptr, splits, lanes)
        polls += 1
    return words, missing


@triton.jit
def poll_words(words_ptr, splits, lanes):
    nothing = lanes.to(tl.int64) & 0
    words = tl.atomic_or(words_ptr + lanes, nothing, mask=lanes < splits, sem="relaxed")
    return words, tl.sum(((words == 0) & (lanes < splits)).to(tl.int32), 0)
