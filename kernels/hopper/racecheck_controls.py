"""A kernel without a race, in which compute-sanitizer's racecheck still reports races.

Triton hands every warp partition its work in shared memory, between barriers of all threads, and one
partition hands a number to another.  What racecheck reports explains why the attention kernels begin
and end as they do (warpgroups.py), and hand numbers over in global memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .warpgroups import exit_threads, static_arrive, static_sync

ORDER = gl.constexpr(15)  # the named barrier behind which the number lies
ALONE = gl.constexpr(14)  # where the first warpgroup waits for itself; the second one below


@gluon.jit
def give(number, full, out_ptr, HOW: gl.constexpr, WAITS: gl.constexpr, LEAVES: gl.constexpr):
    """The first warpgroup: give the second one the program's number, and write it."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0)
    if WAITS == 1 or WAITS == 2:
        static_sync(ALONE, 128)
    if HOW != "none":
        number.store(gl.full([1], i, gl.int32, L))
    if HOW == "mbarrier":
        mbarrier.arrive(full.index(0))
    elif HOW == "named":
        static_arrive(ORDER, 256)
    gl.store(out_ptr + 2 * i, i)
    if LEAVES:
        exit_threads()


@gluon.jit
def take(number, full, out_ptr, HOW: gl.constexpr, WAITS: gl.constexpr, LEAVES: gl.constexpr):
    """The second one: write the number that it was given."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0)
    if WAITS == 2:
        static_sync(ALONE - 1, 128)
    if HOW == "mbarrier":
        mbarrier.wait(full.index(0), 0)
    elif HOW == "named":
        static_sync(ORDER, 256)
    if WAITS == 3:
        static_sync(ALONE - 1, 128)
    if HOW == "none":
        given = i
    else:
        given = gl.sum(number.load(L), 0)
    gl.store(out_ptr + 2 * i + 1, given)
    if LEAVES:
        exit_threads()


@gluon.jit
def control_kernel(out_ptr, HOW: gl.constexpr, WAITS: gl.constexpr, LEAVES: gl.constexpr):
    """out [programs, 2] int32: each program's number, from either warpgroup.

    HOW: what orders the number that is handed over: "none" (no number is), "mbarrier" or "named"
    barrier.  WAITS: who waits at a barrier of its own, for nothing: the first warpgroup (1), both (2),
    or the second, after the handing over (3).  LEAVES: both exit.
    """
    number = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if HOW == "mbarrier":
        full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(full.index(0), count=1)
    else:
        full = 0
    gl.warp_specialize(
        [
            (give, (number, full, out_ptr, HOW, WAITS, LEAVES)),
            (take, (number, full, out_ptr, HOW, WAITS, LEAVES)),
        ],
        [4],
        [168],
    )
