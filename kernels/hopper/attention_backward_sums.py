"""Attention backward on Hopper: the sums of dQ, how they are added to and in which order.

Each query tile [BM, D] of float32 sums lies in memory as two chunks, one for each warpgroup: 64 rows
and N columns in the accumulator's register order, which the postprocess undoes.  (With MORE there is a
third, to which both add.)  The configuration's
DQ says how a chunk leaves: 1, bulk adds by TMA from shared memory, issued by the producer; 0, vector
atomics from the consumer's registers; 2, one warpgroup each way.

Named barriers of the producer and warpgroup c:

    FULL + c    its chunk lies in shared memory
    EMPTY + c   it may send the next chunk: the buffer has been read or, with atomics that wait for
                turns, its turn has come

In order (CFG.ORDERED), the counter of a query tile says how many key tiles have added to it.  Where the
first stores and the others add in any order (CFG.FIRST alone), it says whether the first has stored.
The producer has four warps.  Three of them deal with turns, so that none holds up another's work:

    warp 0      issues the bulk adds; when they are complete it arrives at DONE
    warp 1      looks for the turn of the next step, while the consumers make its dQ
    warp 2      waits at DONE and counts

Why the order holds, in terms of PTX's memory model:

    release_dq_turn
                Bulk adds: the thread that issued them waits until they are complete, not only read
                (wait_group without .read), which makes them visible to it; DONE puts them before what
                the thread that counts does.  Atomics: the consumers issued theirs before they arrived
                at QB, where the producer has waited.  Either way they happen before the increment of
                the counter, since its release is cumulative.
    wait_for_dq_turn
                Warp 1 reads the counter with acquire, so that the earlier adds happen before what
                follows.  Bulk adds go through the asynchronous proxy: the proxy fence puts them behind
                what was acquired, and warp 0 issues them behind a barrier (OB) at which warp 1 arrives
                after that.  Consumers with atomics meet warp 1 at EMPTY before theirs.

Between a consumer's stores to shared memory and the bulk add that reads them stands a proxy fence: the
producer's, after FULL.  It must lie between the two, in the program that makes the asynchronous access
(Lustig, Cooksey, Giroux, "Mixed-Proxy Extensions for the NVIDIA PTX Memory Consistency Model", 2022); a
thread of either side would do here.  A consumer would wait at the fence until its stores have got
through, behind all that the tensor cores read meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .attention_backward_work import FIRST_TURN
from .gluon_names import tma_add, tma_store
from .warpgroups import bar_arrive, static_arrive, static_sync


@gluon.constexpr_function
def by_tma(mode, c):
    """Whether warpgroup c's part of dQ leaves by bulk adds."""
    return mode == 1 or (mode == 2 and c == 0)


@gluon.constexpr_function
def register_order(N):
    """Layout [N / 8, 128, 4]: the [64, N] accumulator as each thread's pieces of four floats."""
    return gl.BlockedLayout([N // 8, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.jit
def register_offsets(N: gl.constexpr):
    """Where those pieces lie in a chunk of 64 N floats [N / 8, 128, 4]."""
    RB: gl.constexpr = register_order(N)
    i0 = gl.arange(0, N // 8, gl.SliceLayout(1, gl.SliceLayout(2, RB)))[:, None, None]
    i1 = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, RB)))[None, :, None]
    i2 = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, RB)))[None, None, :]
    return i0 * 512 + i1 * 4 + i2


# --- the consumers' side ---------------------------------------------------------------------------


@gluon.jit
def accumulate_dq(c: gl.constexpr, tile, first, dq_ptr, stages, dq, CFG: gl.constexpr):
    """Add warpgroup c's [64, N] accumulator to the c-th chunk of query tile `tile`, four floats of
    a thread at a time; first: whether no key tile has added to the tile before."""
    N: gl.constexpr = dq.shape[1]
    x = gl.reshape(dq, [4, 2, 8, N // 8, 4, 2])  # warp, half, row, tile, lane, pair
    x = gl.permute(x, [3, 0, 2, 4, 1, 5])  # tile, warp, row, lane, half, pair
    x = gl.convert_layout(gl.reshape(x, [N // 8, 128, 4]), register_order(N), assert_trivial=True)
    if by_tma(CFG.DQ, c):
        static_sync(CFG.EMPTY + c, 256)
        stages.index(c).store(gl.reshape(x, [128, 32]))
        static_arrive(CFG.FULL + c, 256)
    else:
        at = dq_ptr + (tile * CFG.CHUNKS + c).to(gl.int64) * (64 * N) + register_offsets(N)
        if CFG.FIRST:
            static_sync(CFG.EMPTY + c, CFG.TURN)
            if first:
                gl.store(at, x)
            else:
                gl.atomic_add(at, x, sem="relaxed")
        else:
            gl.atomic_add(at, x, sem="relaxed")


# --- the producer's side ---------------------------------------------------------------------------


@gluon.jit
def send_chunk(c: gl.constexpr, tile, dq_rank, dq_desc, stages, CFG: gl.constexpr):
    """Send warpgroup c's part of dQ from shared memory, once it lies there."""
    if by_tma(CFG.DQ, c):
        static_sync(CFG.FULL + c, 256)
        fence_async_shared()
        at = tile * 128 if CFG.PAIRS else (tile * 2 + c) * 128
        if CFG.FIRST:
            if dq_rank == 0:
                tma_store(dq_desc, [at, 0], stages.index(c))
            else:
                tma_add(dq_desc, [at, 0], stages.index(c))
        else:
            tma_add(dq_desc, [at, 0], stages.index(c))


@gluon.jit
def send_tile(g, tile, dq_rank, dq_desc, stages, CFG: gl.constexpr):
    """Send what step g made of one query tile's dQ, the dq_rank-th to do so: both warpgroups' parts or,
    in pairs, the whole from one of them."""
    if CFG.PAIRS:
        if g & 1 == 0:
            send_chunk(0, tile, dq_rank, dq_desc, stages, CFG)
        else:
            send_chunk(1, tile, dq_rank, dq_desc, stages, CFG)
    else:
        send_chunk(0, tile, dq_rank, dq_desc, stages, CFG)
        send_chunk(1, tile, dq_rank, dq_desc, stages, CFG)


@gluon.jit
def release_dq_buffer(g, CFG: gl.constexpr):
    """Wait until the adds have read shared memory, and tell the consumers or, in pairs, the one that
    makes dQ in step g."""
    if CFG.DQ:
        tma.store_wait(0)
    if CFG.PAIRS:
        bar_arrive(CFG.EMPTY + (g & 1), 256)
    else:
        if by_tma(CFG.DQ, 0):
            static_arrive(CFG.EMPTY, 256)
        if by_tma(CFG.DQ, 1):
            static_arrive(CFG.EMPTY + 1, 256)


@gluon.constexpr_function
def wait_for_dq_turn_ptx(CFG):
    """PTX of wait_for_dq_turn: the second warp looks until the counter $1 says $2 at least, then tells
    the consumers whose adds are atomics."""
    waiting = [c for c in range(2) if not by_tma(CFG.DQ, c)]
    tell = "\n".join(f"bar.arrive {CFG.EMPTY + c}, {CFG.TURN};" for c in waiting)
    return f"""{{
        .reg .pred p;
        .reg .u32 x;
        mov.u32 x, %tid.x;
        shr.u32 x, x, 5;
        setp.ne.u32 p, x, 1;
        @p bra END;
        LOOK:
        ld.acquire.gpu.global.u32 x, [$1];
        setp.lt.u32 p, x, $2;
        @p bra LOOK;
        fence.proxy.async.global;
        {tell}
        END:
        mov.u32 $0, 0;
        }}"""


@gluon.constexpr_function
def release_dq_turn_ptx(CFG):
    """PTX of release_dq_turn: the first warp waits for the bulk adds, which it issued, and the third
    counts at $1; neither holds up the other."""
    wait = "cp.async.bulk.wait_group 0;" if CFG.DQ else ""
    return f"""{{
        .reg .pred p;
        .reg .u32 x;
        mov.u32 x, %tid.x;
        shr.u32 x, x, 5;
        setp.ne.u32 p, x, 0;
        @p bra THIRD;
        {wait}
        bar.warp.sync 0xffffffff;
        bar.arrive {CFG.DONE}, 64;
        bra END;
        THIRD:
        setp.ne.u32 p, x, 2;
        @p bra END;
        bar.sync {CFG.DONE}, 64;
        mov.u32 x, %tid.x;
        setp.eq.u32 p, x, 64;
        @p red.release.gpu.global.add.u32 [$1], 1;
        END:
        mov.u32 $0, 0;
        }}"""


@gluon.jit
def wait_for_dq_turn(turns_ptr, tile, dq_rank, CFG: gl.constexpr):
    """Wait until the first key tile or, in order, the dq_rank tiles before this one have added to query
    tile `tile`; one warp waits."""
    if CFG.FIRST:
        PTX: gl.constexpr = wait_for_dq_turn_ptx(CFG)
        if not CFG.ORDERED:
            dq_rank = gl.minimum(dq_rank, 1)
        at = (turns_ptr + FIRST_TURN + tile).to(gl.int64)
        gl.inline_asm_elementwise(PTX, "=r,l,r", [at, dq_rank], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_dq_turn(turns_ptr, tile, dq_rank, CFG: gl.constexpr):
    """Count the adds to query tile `tile` once they are complete, of the first key tile or, in order,
    of each; call it after QB."""
    if CFG.FIRST:
        PTX: gl.constexpr = release_dq_turn_ptx(CFG)
        at = (turns_ptr + FIRST_TURN + tile).to(gl.int64)
        if CFG.ORDERED:
            gl.inline_asm_elementwise(PTX, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
        else:
            if dq_rank == 0:
                gl.inline_asm_elementwise(PTX, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


# --- finished items --------------------------------------------------------------------------------


@gluon.constexpr_function
def count_item_ptx(CFG, pending):
    """PTX of count_item: the first warp waits for the bulk adds, which it issued, but not for the last
    `pending` ones, and counts at $1."""
    wait = f"cp.async.bulk.wait_group {pending};" if CFG.DQ else ""
    return f"""{{
        .reg .pred p;
        .reg .u32 x;
        mov.u32 x, %tid.x;
        setp.ge.u32 p, x, 32;
        @p bra END;
        {wait}
        bar.warp.sync 0xffffffff;
        setp.eq.u32 p, x, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        END:
        mov.u32 $0, 0;
        }}"""


@gluon.jit
def count_item(turns_ptr, head, BEHIND: gl.constexpr, CFG: gl.constexpr):
    """Count an item of a key head as finished, once all bulk adds but the last BEHIND are complete, and
    so its own.  It is like release_dq_turn, but called once an item, so one warp is enough.

    An item is counted when all but the last two steps of the next item have left.  If that item has
    LEAST_STEPS steps, PENDING bulk adds or more have followed those of this one, so nobody waits for
    these.  (Shorter items are counted too early, and their counts are not used.)
    """
    PTX: gl.constexpr = count_item_ptx(CFG, BEHIND)
    at = (turns_ptr - 1 - head).to(gl.int64)
    gl.inline_asm_elementwise(PTX, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)
