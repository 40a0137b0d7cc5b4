"""Attention backward on Hopper: the first two products of a step, with lse and delta.

attention_backward.py says what they are for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .attention_backward_rows import select_columns
from .warpgroups import left_operand


@gluon.jit
def add_product(x, rows, queries, regs, REGS: gl.constexpr, USE_ACC: gl.constexpr):
    """Begin to add rows [64, D] queries^T [D, BM] to x, or to put it there: an asynchronous product, or
    two with the first REGS columns of rows in registers."""
    D: gl.constexpr = queries.shape[1]
    if REGS:
        first = queries.slice(0, REGS, 1)
        x = warpgroup_mma(regs, first.permute((1, 0)), x, use_acc=USE_ACC, is_async=True)
        rows = rows.slice(REGS, D - REGS, 1)
        x = warpgroup_mma(rows, queries.slice(REGS, D - REGS, 1).permute((1, 0)), x, is_async=True)
    else:
        x = warpgroup_mma(rows, queries.permute((1, 0)), x, use_acc=USE_ACC, is_async=True)
    return x


@gluon.jit
def add_term(
    x, lse_delta, TERM: gl.constexpr, LAYOUT: gl.constexpr, selector=0, SHARED: gl.constexpr = False
):
    """Begin to add to each column of x [64, BM] its query's term, LSE or DELTA of lse_delta [BM,
    COLUMNS]: see product_with_term."""
    if SHARED:
        ones = selector.index(TERM // 3)
    else:
        ones = select_columns(TERM, left_operand(LAYOUT))
    return warpgroup_mma(ones, lse_delta.permute((1, 0)), x, is_async=True)


@gluon.jit
def product_with_term(
    rows,
    queries,
    lse_delta,
    TERM: gl.constexpr,
    LAYOUT: gl.constexpr,
    selector=0,
    regs=0,
    REGS: gl.constexpr = 0,
    SHARED: gl.constexpr = False,
    TERM_FIRST: gl.constexpr = False,
):
    """Begin rows [64, D] queries^T [D, BM], and add to each column its query's term, LSE or DELTA of
    lse_delta [BM, COLUMNS], last or (TERM_FIRST) first: two asynchronous products, or three with the
    first REGS columns of rows in registers.

    The queries are the columns, so each thread would need lse and delta of a quarter of them: 32
    registers, and a twelfth to a sixth of shared memory's bandwidth, as every warp reads them in every
    step.  A product with ones in three columns takes a fourth of that.  The ones lie in four registers
    or, where registers are short (SHARED), in shared memory (selector).  `probabilities` and
    `score_gradient` then have nothing to subtract.
    """
    BM: gl.constexpr = lse_delta.shape[0]
    x = gl.zeros([64, BM], gl.float32, LAYOUT)
    if TERM_FIRST:
        gl.static_assert(SHARED)
        x = warpgroup_mma(
            selector.index(TERM // 3), lse_delta.permute((1, 0)), x, use_acc=False, is_async=True
        )
    x = add_product(x, rows, queries, regs, REGS, TERM_FIRST)
    if not TERM_FIRST:
        x = add_term(x, lse_delta, TERM, LAYOUT, selector, SHARED)
    return x
