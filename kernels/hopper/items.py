"""Work items that are taken one by one, by a counter in global memory: dynamic scheduling.

Each program takes the item of the lowest number that nobody has taken, works on it and takes the next.
This is list scheduling, without a model of what an item costs.

How an item's number reaches the consumers.  The producer takes an item before the consumers need it,
and writes its number to a ring in global memory (put_item).  The barrier of the item's first queries
covers the write: the thread that writes the number then arrives at that barrier, which releases it to
those who wait there.  (In shared memory racecheck takes the number for a race, see warpgroups.py.)
The ring has four places, and a number is written again only when all consumers have read it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .warpgroups import opaque_zero

# What turns_ptr points at.  [0]: the counter of work items, which starts at 0; from FIRST_NUMBER on:
# the numbers of each program's last items.
NUMBERS = gl.constexpr(4)
FIRST_NUMBER = gl.constexpr(32)
MOST_PROGRAMS = gl.constexpr(144)  # no GPU of compute capability 9.0 has more multiprocessors
TURNS = gl.constexpr(FIRST_NUMBER.value + NUMBERS.value * MOST_PROGRAMS.value)  # words


@gluon.jit
def take_item(turns_ptr, KNOWN: gl.constexpr):
    """The number of the next work item, for all threads of the producer.  KNOWN: each program has one
    already, that of its own number."""
    t = gl.atomic_add(turns_ptr, 1, sem="relaxed")
    if KNOWN:
        t += gl.num_programs(0)
    return t


@gluon.jit
def number_of(turns_ptr, r):
    """Where the number of the program's r-th item is."""
    return turns_ptr + FIRST_NUMBER + gl.program_id(0) * NUMBERS + (r & (NUMBERS - 1))


@gluon.jit
def put_item(turns_ptr, r, t):
    """Write the number of the program's r-th item for the consumers, before its first queries are asked
    for."""
    gl.store(number_of(turns_ptr, r), t)


@gluon.jit
def get_item(turns_ptr, r):
    """The number of the program's r-th item, once its first queries have come."""
    return gl.load(number_of(turns_ptr, r + opaque_zero()))


@gluon.jit
def item_of_lists(t, NT, BH, HG):
    """Item t of those whose tiles have lists as (head of BH, place in the order of its NT tiles): the
    longest of each head, then the others, longer ones first among HG heads at a time."""
    r = gl.maximum(t - BH, 0)
    grp = r // gl.maximum(HG * (NT - 1), 1)
    r -= grp * (HG * (NT - 1))
    hg = gl.maximum(gl.minimum(HG, BH - grp * HG), 1)
    place = r // hg
    longest = t < BH
    return gl.where(longest, t, grp * HG + r - place * hg), gl.where(longest, 0, 1 + place)
