"""Attention forward on Hopper, in Gluon: TMA, asynchronous wgmma, warp specialisation.

    q [B, Hq, Sq, D], k, v [B, Hkv, Sk, D] -> out [B, Hq, Sq, D], lse [B, Hq, Sq]
    D: head_dim padded to 64, 128 or 256 (TMA fills with zeros), BM = 64 W query rows, BN keys a tile
    with MORE, q and k [B, H, S, D + MORE] and v and out [B, H, S, D]: 192 and 128 columns

Words of this folder:

    work item      what a program takes at a time: here the queries of one tile of one head
    key tile       BN keys and values, the step of a consumer's loop
    slot, phase    which buffer of a ring comes next, and the parity of its mbarrier
    phantom        a load of no bytes, after the last tile, for those who look one tile ahead
    walk, wave     of the backward: the order in which an item takes query tiles, and the programs that
                   go one way together

The algorithm is that of kernels/attention_forward.py.  What differs is who does what, and when:

    producer   one warp or four (PRODUCERS) with few registers keep TMA busy: K and V tiles go into
               rings of KS and VS buffers, Q tiles into one buffer for each consumer
               (attention_forward_work.py)
    consumers  W warpgroups with 64 query rows each, all on the same ring of keys
               (attention_forward_consumers.py)

Partitions of a program, with their warps; the first one is the program's own:

    W == 1, PRODUCERS == 1      consumer 4; producer 1, nothing 1, nothing 2
    W == 2, PRODUCERS == 1      consumer 4; consumer 4, producer 1, nothing 1, nothing 2
    W >= 2, PRODUCERS == 4      producer 4; W consumers of 4 each

A buffer is full when its mbarrier (k_full, v_full, q_full) has counted the bytes that TMA brought.  It
is empty when every consumer has arrived at its named barrier (KB, VB, QB: see HopperForward.BARRIERS).

A program takes one work item after another.  Within an item a consumer takes the key tiles from right
to left.  For each it issues S_j = Q K_j^T and, behind it, P V of the tile before.  The softmax of S_j
(online_softmax.py) runs

    OVERLAP    as soon as S_j is there, while the tensor cores still do this consumer's P V
    otherwise  when both are done and the registers of P are free again; another consumer's products run

Two or three consumers take turns to issue products (PINGPONG, at the named barriers PB), so that one
computes its softmax while others have the tensor cores.  Four, and three with OVERLAP, do without.  The
same happens across items: the first scores of the next item are issued behind the last P V of this one,
and the epilogue (lse, 1 / l, the stores) runs meanwhile.  So no wgmma is in flight at any loop edge,
and nothing depends on there being a next tile: the producer ends with a phantom K and Q.

wgmma reads its operands at 128 bytes a cycle at most.  At head_dim 128 scores and P V read 80 bytes and
TMA writes 32.  With Q_IN_REGS a consumer keeps three quarters of its queries in registers, which saves
12.

Long rows run at the card's power limit, so what takes less energy is faster.  There head_dim 128 has
three consumers, which read keys and values from L2 two times where two consumers read them three times.
Their registers suffice for key tiles of 64.

Where items are short, most of the time goes into their beginnings and ends.  At head_dim 64 three
programs of one consumer each fit on a multiprocessor (PROGRAMS), with key tiles of 64 and all of their
queries in registers: while one of them begins or ends an item the others compute.  They read keys and
values three times as often as three consumers of one program, so in longer rows they are slower.  The
rate of instructions limits them: a producer of four warps took a fifth of all instructions.

With few queries most rows of an item would be padding, and each query head of a group would read the
same keys and values.  With PACK an item has a key head: row r is head r % PACK of the group and query
r // PACK of the tile.  q is then seen as [B, Hkv, Sq, group, D], of which TMA brings boxes with PACK
heads, and zeros past a group that is no power of two.  Row by row the arithmetic is the same.

Under a causal mask items differ in length.  The order in which each program takes them comes from a
table, `work_table` (balanced_work in configs/hopper_forward.py).  Where intervals or the lengths of
sequences decide, which the host does not know, programs take items one by one (DYNAMIC, items.py),
those that visit many key tiles first, and `work_table` is what they count with.  Without a mask all
items are alike, except the last of each head, which may have rows for some of the consumers only.  With
IDLE the other consumers skip it, so that it takes less time, and the order comes from a table too.

Where queries and heads are too few to fill the card, keys are split.  With SPLIT the key tiles that an
item would visit are cut into `parts`, as equal as can be, and each part is an item.  Of the tiles that
are visited, in their order, a part has those from one number to another, whatever the mask leaves out
between them.  It writes its own (out, lse), in float32, as if of more batch entries;
../attention_merge.py joins the parts.  A part without key tiles visits one all the same, so that every
loop and every ring has a tile for each item, and writes lse = -inf.

Latent attention has 192 columns of queries and keys, and 128 of values.  Blocks of Gluon are powers of
two, so a tile of queries or keys lies in shared memory as D = 128 columns and MORE = 64, under one
mbarrier, and scores are two products (or three, of queries in registers) into one accumulator.
Everything else is as at head_dim 128, registers too.

Masks are `visible` of scores.py, written so that a thread compares with constants.  A tile needs no
mask where key_ranges of schedule.py says so.  A consumer's rows may see nothing of a tile that other
consumers need, or only its first half.  With SKIP, what they do not see takes no mask and no softmax.

Sources: Shah et al., "FlashAttention-3" (2024), sections 3.1 and 3.2, for the roles and the ping-pong.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .attention_forward_consumers import consumer
from .attention_forward_work import producer
from .warpgroups import exit_threads

VARYING = (
    "total",
    "NT",
    "H",
    "GROUP",
    "BH",
    "HG",
    "parts",
    "Sq",
    "Sk",
    "offset",
    "so_b",
    "so_h",
    "so_s",
    "D_out",
)


@gluon.jit(do_not_specialize=VARYING)
def attention_forward_kernel(
    q_desc,  # TMA boxes [1, 1, 64, D], packed [1, 1, 64 / PACK, PACK, D]
    k_desc,
    v_desc,  # [1, 1, BN, D]
    o_ptr,  # with SPLIT float32, of B * parts entries, as lse
    lse_ptr,
    work_table,  # int32 [rounds, programs] if HAS_WORK_TABLE, [TURNS] if DYNAMIC, else not read
    total,  # work items: NT * BH, with SPLIT times parts
    NT,  # query tiles of a head
    H,
    GROUP,
    BH,  # query heads, or key heads if packed; query heads a key head; B * H
    HG,  # of these heads, those whose work items are mixed
    Sq,
    Sk,
    offset,  # query i sees key j <= i + offset
    so_b,
    so_h,
    so_s,  # strides of out, in units of 8 elements
    D_out,  # head_dim as it is in memory, a multiple of 8
    scale_log2,  # scale * log2(e)
    given,  # of the variant, see scores.py
    parts,  # of an item's key tiles if SPLIT, else None
    CFG: gl.constexpr,  # HopperForward
    more_q_desc=None,
    more_k_desc=None,  # boxes of 64 columns of q and k if MORE
):
    W: gl.constexpr = CFG.W
    D: gl.constexpr = CFG.D
    BN: gl.constexpr = CFG.BN
    KS: gl.constexpr = CFG.KS
    VS: gl.constexpr = CFG.VS
    dt: gl.constexpr = q_desc.dtype
    if CFG.PACK > 1:
        qs = gl.allocate_shared_memory(dt, [W, 1, 1, CFG.CQ, CFG.PACK, D], q_desc.layout)
    else:
        qs = gl.allocate_shared_memory(dt, [W, 1, 1, 64, D], q_desc.layout)
    ks = gl.allocate_shared_memory(dt, [KS, 1, 1, BN, D], k_desc.layout)
    vs = gl.allocate_shared_memory(dt, [VS, 1, 1, BN, D], v_desc.layout)
    more_qs = 0
    more_ks = 0
    if CFG.MORE:
        if CFG.PACK > 1:
            more_qs = gl.allocate_shared_memory(
                dt, [W, 1, 1, CFG.CQ, CFG.PACK, CFG.MORE], more_q_desc.layout
            )
        else:
            more_qs = gl.allocate_shared_memory(dt, [W, 1, 1, 64, CFG.MORE], more_q_desc.layout)
        more_ks = gl.allocate_shared_memory(dt, [KS, 1, 1, BN, CFG.MORE], more_k_desc.layout)
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [W, 1], ML)
    k_full = gl.allocate_shared_memory(gl.int64, [KS, 1], ML)
    v_full = gl.allocate_shared_memory(gl.int64, [VS, 1], ML)
    produce = (
        q_desc, k_desc, v_desc, qs, ks, vs, q_full, k_full, v_full,
        work_table, total, NT, H, GROUP, BH, HG, parts, Sk, offset, given,
        more_q_desc, more_k_desc, more_qs, more_ks,
    )  # fmt: skip
    consume = (
        o_ptr, lse_ptr, qs, ks, vs, q_full, k_full, v_full,
        work_table, total, NT, H, GROUP, BH, HG, parts, Sq, Sk, offset, so_b, so_h, so_s, D_out,
        scale_log2, given, more_qs, more_ks,
    )  # fmt: skip
    # A producer of one warp shares its warpgroup with three warps that have nothing to do.
    if W == 1:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), consume, CFG)),
                (producer, (produce, CFG)),
                (exit_threads, ()),
                (exit_threads, ()),
            ],
            [1, 1, 2],
            [24, 24, 24],
        )
    elif CFG.PRODUCERS == 1:
        gl.warp_specialize(
            [
                (consumer, (gl.constexpr(0), consume, CFG)),
                (consumer, (gl.constexpr(1), consume, CFG)),
                (producer, (produce, CFG)),
                (exit_threads, ()),
                (exit_threads, ()),
            ],
            [4, 1, 1, 2],
            [CFG.REGISTERS, 24, 24, 24],
        )
    elif W == 2:
        gl.warp_specialize(
            [
                (producer, (produce, CFG)),
                (consumer, (gl.constexpr(0), consume, CFG)),
                (consumer, (gl.constexpr(1), consume, CFG)),
            ],
            [4, 4],
            [CFG.REGISTERS, CFG.REGISTERS],
        )
    elif W == 3:
        gl.warp_specialize(
            [
                (producer, (produce, CFG)),
                (consumer, (gl.constexpr(0), consume, CFG)),
                (consumer, (gl.constexpr(1), consume, CFG)),
                (consumer, (gl.constexpr(2), consume, CFG)),
            ],
            [4, 4, 4],
            [CFG.REGISTERS, CFG.REGISTERS, CFG.REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (producer, (produce, CFG)),
                (consumer, (gl.constexpr(0), consume, CFG)),
                (consumer, (gl.constexpr(1), consume, CFG)),
                (consumer, (gl.constexpr(2), consume, CFG)),
                (consumer, (gl.constexpr(3), consume, CFG)),
            ],
            [4, 4, 4, 4],
            [CFG.REGISTERS, CFG.REGISTERS, CFG.REGISTERS, CFG.REGISTERS],
        )
