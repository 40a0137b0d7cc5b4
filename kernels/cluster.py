"""Partial results of the programs of a thread block cluster, exchanged through their shared memories.

For Hopper and later.  A kernel launched with num_ctas = S runs on clusters of S programs, which start
together on neighbouring multiprocessors.  It spreads the rows of a tile [S, C] over them, one each, and
each program reads here what the others reduced their rows to.  That needs no zeroed words in memory, no
polling and no fence: a transaction barrier in shared memory counts the bytes that have arrived.

    mailbox = cluster_begin()
    everyones_a, everyones_b = cluster_exchange(mailbox, a, b, number, S)       # number = 0, 1, 2, ...

Exchanges alternate between two halves of the mailbox.  A program can be ahead of another by one
exchange, not by two; it then writes where nobody reads any more.  Between two exchanges the program
must have a barrier, as any reduction along columns has.
"""

import triton
import triton.language as tl

from .interpreter import INTERPRETED

# The mailbox: 2 x 16 pairs of float32, then 2 barriers of 8 bytes.
BEGIN = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    .shared .align 16 .b8 mailbox[272];
    mov.u32 $0, mailbox;
    mov.u32 lane, %tid.x;
    setp.eq.u32 first, lane, $1;
    @first mbarrier.init.shared::cta.b64 [$0 + 256], 1;
    @first mbarrier.init.shared::cta.b64 [$0 + 264], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
}""")

# Thread i writes to program i, and all wait for what the others write to their own.
EXCHANGE = tl.constexpr("""{
    .reg .pred first, mine, complete;
    .reg .b32 rank, lane, turn, phase, barrier, there, barrier_there, bytes;
    .reg .b64 both;
    mov.u32 rank, %cluster_ctarank;
    mov.u32 lane, %tid.x;
    and.b32 turn, $4, 1;
    shr.u32 phase, $4, 1;
    and.b32 phase, phase, 1;
    mad.lo.u32 barrier, turn, 8, $1;
    add.u32 barrier, barrier, 256;
    mad.lo.u32 $0, turn, 128, $1;
    shl.b32 bytes, $5, 3;
    setp.eq.u32 first, lane, 0;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], bytes;
    setp.lt.u32 mine, lane, $5;
    mad.lo.u32 there, rank, 8, $0;
    mov.b64 both, {$2, $3};
    @mine mapa.shared::cluster.u32 there, there, lane;
    @mine mapa.shared::cluster.u32 barrier_there, barrier, lane;
    @mine st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], both, [barrier_there];
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 complete, [barrier], phase;
    @!complete bra WAIT;
}""")


@triton.jit
def cluster_begin():
    """Make a mailbox, and wait until all programs of the cluster have one; returns its address."""
    if INTERPRETED:
        return 0
    else:
        return tl.inline_asm_elementwise(BEGIN, "=&r,r", [0], tl.int32, is_pure=False, pack=1)


@triton.jit
def cluster_exchange(mailbox, a, b, number, S: tl.constexpr):
    """From a and b [S] float32, of which each program has one element, to [S, S]: all of them, the same
    in every row, of which each program has one."""
    tl.static_assert(S <= 16)
    if INTERPRETED:  # one program has the whole tile
        return a[None, :] + tl.zeros([S, S], tl.float32), b[None, :] + tl.zeros([S, S], tl.float32)
    else:
        first = tl.inline_asm_elementwise(
            EXCHANGE, "=&r,r,f,f,r,r", [mailbox, a, b, number, S], tl.int32, is_pure=False, pack=1
        )
        slots = first[:, None] + 8 * tl.arange(0, S)[None, :]
        return tl.inline_asm_elementwise(
            "ld.shared.v2.f32 {$0, $1}, [$2];",
            "=f,=f,r",
            [slots],
            (tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
