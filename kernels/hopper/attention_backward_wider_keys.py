"""Attention backward on Hopper: the inner loop of consumers whose queries and keys have more columns
than values, 192 and 128.

Blocks of Gluon are powers of two, so tiles of Q and K, and dK, are D = 128 columns and MORE = 64.

Registers are what limits it.  A warpgroup's 64 keys have 96 of them for dK and 64 for dV, which leaves
80.  So scores and dP, 32 each, are not there at a time: dP begins when P is 16 bits.  (dS is made of
those, as at head_dim 256.)  dQ too is made in pieces of 64 columns, one after the other: of the first
128 columns each warpgroup makes a half, from dS of all 128 keys; of the last 64 each makes what its own
keys add.  So both add to these, in any order, and dQ has no fixed one.  It leaves by vector atomics.
Shared memory has no room for it: a step of 64 queries by 128 keys takes 204 KiB.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..scores import probabilities, score_gradient, unit_of
from .attention_backward_masks import mask_if_needed, modify
from .attention_backward_products import add_product, product_with_term
from .attention_backward_rows import DELTA, LSE
from .attention_backward_sums import accumulate_dq
from .attention_backward_work import inner_step, last_visible_key
from .online_softmax import pack_halves, unpack_halves
from .warpgroups import accumulator, bar_arrive, left_operand, matrix, static_sync


@gluon.jit
def floats_of_halves(p, L: gl.constexpr, dt: gl.constexpr):
    """Pairs of dt in int32 p [64, C / 2] as float32 [64, C] in layout L, that of a product."""
    if dt == gl.bfloat16:
        CODE: gl.constexpr = """{
            .reg .b32 high;
            and.b32 high, $2, 0xffff0000;
            shl.b32 $0, $2, 16;
            mov.b32 $1, high;
            }"""
    else:
        CODE: gl.constexpr = """{
            .reg .b16 a, b;
            mov.b32 {a, b}, $2;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            }"""
    a, b = gl.inline_asm_elementwise(
        CODE, "=r,=r,r", [p], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(a, b).reshape([64, 2 * p.shape[1]]), L, assert_trivial=True)


@gluon.jit
def wider_keys_loop(
    c: gl.constexpr,
    shared,
    own,
    dk,
    dv,
    it,
    tile,
    first,
    begin,
    end,
    last_key,
    M,
    scale_log2,
    variables,
    CFG: gl.constexpr,
):
    """inner_loop of attention_backward_consumers.py; dk: a pair, of D columns and MORE."""
    dq_ptr, qs, dos, ks, vs, lse_deltas, dss, stages, selector, q_full, do_full, more = shared
    more_qs, more_ks = more
    _, _, _, _, limit = own
    dk, more_dk = dk
    BM: gl.constexpr = CFG.BM
    BN: gl.constexpr = CFG.BN
    D: gl.constexpr = CFG.D
    MORE: gl.constexpr = CFG.MORE
    KIND: gl.constexpr = CFG.KIND
    ST: gl.constexpr = accumulator(BM)
    QA: gl.constexpr = accumulator(64)
    A: gl.constexpr = left_operand(accumulator(D))
    MA: gl.constexpr = left_operand(accumulator(MORE))
    dt: gl.constexpr = qs.dtype
    for index in range(begin, end, CFG.STEP):
        slot = it & 1
        q = matrix(qs.index(slot), BM, D)
        more_q = matrix(more_qs.index(slot), BM, MORE)
        do = matrix(dos.index(slot), BM, D)
        lse_delta = lse_deltas.index(slot)
        k = matrix(ks.index(it >> 30), BN, D)
        more_k = matrix(more_ks.index(it >> 30), BN, MORE).slice(64 * c, 64, 0)
        x = product_with_term(k.slice(64 * c, 64, 0), q, lse_delta, LSE, ST, selector, SHARED=True)
        x = add_product(x, more_k, more_q, 0, 0, True)
        x = warpgroup_mma_wait(0, deps=(x,))
        place = last_visible_key(index, last_key, CFG)
        x = modify(x, place, scale_log2, variables, KIND)
        x = mask_if_needed(x, limit, place, variables, KIND)
        p = pack_halves(probabilities(x, 0.0, unit_of(scale_log2, KIND)).to(dt))
        mbarrier.wait(do_full.index(slot), (it >> 1) & 1)
        dv = warpgroup_mma(unpack_halves(p, A, dt), do, dv, is_async=True)
        vc = matrix(vs.index(it >> 30), BN, D).slice(64 * c, 64, 0)
        dp = product_with_term(vc, do, lse_delta, DELTA, ST, selector, SHARED=True)
        dv, dp = warpgroup_mma_wait(0, deps=(dv, dp))
        bar_arrive(CFG.OB + slot, 384)
        ds = score_gradient(floats_of_halves(p, ST, dt), dp, 0.0).to(dt)
        dsw = dss.index(slot)
        dsw.slice(64 * c, 64, 0).store(ds)
        fence_async_shared()
        static_sync(CFG.DS, 256)
        zq = gl.zeros([64, 64], gl.float32, QA)
        dq = warpgroup_mma(
            dsw.permute((1, 0)), k.slice(64 * c, 64, 1), zq, use_acc=False, is_async=True
        )
        dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
        more_dk = warpgroup_mma(gl.convert_layout(ds, MA), more_q, more_dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=(dq,))
        accumulate_dq(c, tile, first, dq_ptr, stages, dq, CFG)
        it += 1
        # This wait keeps ptxas from waiting for the products before the adds.
        mbarrier.wait(q_full.index(it & 1), (it >> 1) & 1)
        mine = dsw.slice(64 * c, 64, 0).permute((1, 0))
        more_dq = warpgroup_mma(mine, more_k, zq, use_acc=False, is_async=True)
        dk, more_dk, more_dq = warpgroup_mma_wait(0, deps=(dk, more_dk, more_dq))
        accumulate_dq(2, tile, first, dq_ptr, stages, more_dq, CFG)
        bar_arrive(CFG.QB + slot, 384)
        tile = inner_step(tile, M, CFG)
    return (dk, more_dk), dv, it, tile
