"""Cross entropy of logits with class targets, forward and backward.

The loss of a row x of V logits with target t is a function of its online-softmax state (m, l) of
online_softmax.py and of two sums; c = w_t is the target's class weight (1 without), W = sum(w_j):

    lse  = m + log(l)
    loss = (1 - smoothing) c (lse - x_t) + smoothing / V (W lse - sum(w_j x_j)) + z_loss lse^2

    a    = (1 - smoothing) c + smoothing / V W + 2 z_loss lse
    dx_j = exp(x_j - m) / l * a - smoothing / V w_j - (1 - smoothing) c [j = t]

With a softcap, x stands for softcap tanh(raw / softcap), whose slope multiplies dx.  lse - x_t is
summed as (m - x_t) + log(l), which keeps its digits where |x| is large.  A row whose target is
ignore_index has loss 0 and gradient 0; one whose target is no class has loss and gradient NaN.

A row is read as G groups of E neighbouring elements at a time.  One thread keeps the state of a group,
and nothing passes between threads until the states merge at the end of the row.  (Where rows do not
start at multiples of 16 bytes, a thread can load only one element at a time.  Its E elements then lie G
apart, so that neighbouring threads still load neighbours.)  The gradient is written either in the
forward, while the row is still in cache (two passes over memory instead of three), or by the backward
kernel from the saved state.

In the forward the upstream gradient is not known yet, and is taken to be 1.  If it turns out to be 1,
the backward kernel does nothing; otherwise it writes the gradient again.  So a gradient depends on its
inputs alone, not on earlier calls.

Legend: M rows, V classes; a tile is [R * G, E], R rows as G groups of E elements each, C = G * E
columns; x, dx [M, V] of unit column stride; targets [M]; weight [V]; loss, z, lse, m, l [M] float32.
z is the part z_loss lse^2 of the loss.  Sources: Milakov and Gimelshein, "Online
normalizer calculation for softmax" (2018); Szegedy et al. (2016) for smoothing; Chowdhery et al.,
"PaLM" (2022), for the z-loss; Gemma Team, "Gemma 2" (2024), for the softcap.
"""

import triton
import triton.language as tl

from .interpreter import rounded
from .online_softmax import (
    LOG2E,
    exponentials,
    online_softmax_join,
    online_softmax_start,
    online_softmax_update,
    shift_of,
)


@triton.jit
def tanh(x):
    """Within two roundings of float32: near 0, where 1 - 2 / (1 + e^2x) would cancel, a polynomial
    fitted to (tanh(x) - x) / x^3."""
    a = tl.abs(x)
    z = x * x
    p = z * 0.00214296 - 0.0081774
    p = p * z + 0.0217007
    p = p * z - 0.05394676
    p = p * z + 0.13333206
    p = p * z - 0.33333331
    far = 1.0 - 2.0 * (1.0 / (1.0 + tl.exp2(a * (2.0 * LOG2E))))
    return tl.where(a < 0.625, x + x * z * p, tl.where(x < 0.0, -far, far))


@triton.jit
def load_scores(pointers, mask, softcap, SOFTCAP: tl.constexpr, LAST: tl.constexpr):
    """Logits as float32, softcapped, -inf outside the mask.  LAST: they are not needed again."""
    POLICY: tl.constexpr = "evict_first" if LAST else ""
    x = tl.load(pointers, mask=mask, other=-float("inf"), eviction_policy=POLICY)
    x = x.to(tl.float32)
    if SOFTCAP:
        x = tl.where(mask, softcap * tanh(x * (1.0 / softcap)), -float("inf"))
    return x


@triton.jit
def class_weights(weight_ptr, cols, mask):
    """w_j of a tile's columns, 1 where there are no class weights."""
    if weight_ptr is None:
        return 1.0
    else:
        return tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def weights_total(weight_sum_ptr, V):
    """W = sum(w_j)."""
    if weight_sum_ptr is None:
        return V * 1.0
    else:
        return tl.load(weight_sum_ptr)


@triton.jit
def tile_columns(lane, G: tl.constexpr, E: tl.constexpr, ALIGNED: tl.constexpr):
    """Columns of a tile [R * G, E]: those of one group are neighbours if ALIGNED, else G apart."""
    if ALIGNED:
        return (lane % G * E)[:, None] + tl.arange(0, E)[None, :]
    else:
        return (lane % G)[:, None] + (tl.arange(0, E) * G)[None, :]


@triton.jit
def per_lane(v, R: tl.constexpr, G: tl.constexpr):
    """A value of each row [R] for each of its groups: [R * G, 1], or [1, 1] for one row."""
    if R == 1:
        return v[:, None]
    else:
        return tl.reshape(tl.broadcast_to(v[:, None], [R, G]), [R * G])[:, None]


@triton.jit
def target_of(targets_ptr, weight_ptr, row, inside, V, ignore_index):
    """(target, c, kept) of rows [R]: -1 and NaN for a target that is no class, kept False where it is
    ignore_index."""
    target = tl.load(targets_ptr + row, mask=inside, other=ignore_index)
    kept = target != ignore_index
    valid = kept & (target >= 0) & (target < V)
    target = tl.where(valid, target, -1).to(tl.int32)
    if weight_ptr is None:
        c = tl.where(valid, 1.0, float("nan"))
    else:
        c = tl.load(weight_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
    return target, c, kept


@triton.jit
def coefficients(lse, c, W, V, smoothing, z_loss, SMOOTHING: tl.constexpr):
    """(a, hit): the factor of the softmax in dx, and what the target's own column loses."""
    if SMOOTHING:
        hit = (1.0 - smoothing) * c
        a = hit + smoothing / V * W
    else:
        hit = c
        a = c
    return a + 2.0 * z_loss * lse, hit


@triton.jit
def gradient(
    x,
    cols,
    mask,
    m,
    rate,
    hit,
    spread,
    target,
    weight_ptr,
    softcap,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """dx of scores x; values of a row are [R * G, 1].  rate is a / l, spread is smoothing / V; they and
    hit include the upstream gradient."""
    dx = exponentials(x, shift_of(m), LOG2E, True) * rate
    dx = tl.where(cols == target, dx - hit, dx)
    if SMOOTHING:
        dx -= class_weights(weight_ptr, cols, mask) * spread
    if SOFTCAP:
        slope = x / softcap
        dx = tl.where(mask, dx * (1.0 - slope * slope), 0.0)
    return dx


@triton.jit
def take_tile(
    m, l, total, x_row, cols, mask, weight_ptr, softcap, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr
):
    """Take one tile into the states, and the sums of w_j x_j, of the groups [R * G]."""
    x = load_scores(x_row + cols, mask, softcap, SOFTCAP, False)
    m, l, _, _ = online_softmax_update(m, l, x, LOG2E, True)
    if SMOOTHING:
        total += tl.sum(tl.where(mask, class_weights(weight_ptr, cols, mask) * x, 0.0), 1)
    return m, l, total


@triton.jit
def give_tile(
    x_row,
    dx_row,
    cols,
    wanted,
    mask,
    m,
    rate,
    hit,
    spread,
    target,
    weight_ptr,
    softcap,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Write one tile of dx.  Rows that are not wanted have rate, hit and spread 0, and are not read."""
    x = load_scores(x_row + cols, wanted & mask, softcap, SOFTCAP, True)
    dx = gradient(
        x, cols, wanted & mask, m, rate, hit, spread, target, weight_ptr, softcap, SMOOTHING, SOFTCAP
    )
    dx = rounded(dx, dx_row.dtype.element_ty)
    tl.store(dx_row + cols, dx, mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["M", "ignore_index"])
def cross_entropy_forward_kernel(
    x_ptr, targets_ptr, weight_ptr, weight_sum_ptr, denominator_ptr,
    loss_ptr, z_ptr, lse_ptr, m_ptr, l_ptr, dx_ptr,
    x_stride, dx_stride, M, V, ignore_index, smoothing, z_loss, softcap,
    SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Program i takes rows i * R to i * R + R - 1; more than one only where a tile holds them whole.

    With dx_ptr it also writes dx of the sum of the losses, divided by the denominator if there is one;
    dx may be x.  KEEP: lse of ignored rows is wanted too; otherwise they are not read.  ALIGNED:
    x_stride is a multiple of 16 bytes.
    """
    C: tl.constexpr = G * E
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)  # [R]
    inside = row < M
    target, c, kept = target_of(targets_ptr, weight_ptr, row, inside, V, ignore_index)
    wanted = inside & (kept | KEEP)
    # Read before anything is written, since dx may be x.
    x_target = load_scores(x_ptr + row * x_stride + target, target >= 0, softcap, SOFTCAP, False)

    lane = tl.arange(0, R * G)
    rows = per_lane(row, R, G)
    lanes = tile_columns(lane, G, E, ALIGNED)  # [R * G, E]
    x_row = x_ptr + rows * x_stride
    wanted_lane = per_lane(wanted, R, G)
    # Whole tiles need no mask of columns; they are only where R is 1, and so all rows exist.
    whole = 0 if R > 1 else V // C
    read = tl.max(wanted.to(tl.int32), 0)
    m, l = online_softmax_start(R * G)
    total = tl.zeros([R * G], tl.float32)
    for i in range(0, whole * read):
        m, l, total = take_tile(
            m, l, total, x_row, i * C + lanes, wanted_lane, weight_ptr, softcap, SMOOTHING, SOFTCAP
        )
    rest = whole * C + lanes
    if whole * C < V:
        m, l, total = take_tile(
            m, l, total, x_row, rest, wanted_lane & (rest < V), weight_ptr, softcap, SMOOTHING, SOFTCAP
        )
    m, l = online_softmax_join(tl.reshape(m, [R, G]), tl.reshape(l, [R, G]), LOG2E)
    log_l = tl.log(l)
    lse = m + log_l

    W = weights_total(weight_sum_ptr, V)
    z = z_loss * lse * lse
    loss = c * ((m - x_target) + log_l)
    # Which product joins a sum is said here: the compiler would choose another with dx than without.
    if SMOOTHING:
        total_row = tl.sum(tl.reshape(total, [R, G]), 1)
        loss = tl.fma(1.0 - smoothing, loss, smoothing / V * tl.fma(W, lse, -total_row))
    loss = tl.fma(z_loss * lse, lse, loss)
    tl.store(loss_ptr + row, tl.where(kept, loss, 0.0), mask=inside)
    tl.store(z_ptr + row, tl.where(kept, z, 0.0), mask=inside)
    tl.store(lse_ptr + row, lse, mask=inside)
    tl.store(m_ptr + row, m, mask=inside)
    tl.store(l_ptr + row, l, mask=inside)

    if dx_ptr is not None:
        above = 1.0
        if denominator_ptr is not None:
            above = tl.div_rn(1.0, tl.load(denominator_ptr))
        a, hit = coefficients(lse, c, W, V, smoothing, z_loss, SMOOTHING)
        rate = per_lane(tl.where(kept, a * above / l, 0.0), R, G)
        hit = per_lane(tl.where(kept, hit * above, 0.0), R, G)
        spread = per_lane(tl.where(kept, smoothing / V * above, 0.0), R, G)
        target = per_lane(target, R, G)
        m = per_lane(m, R, G)
        dx_row = dx_ptr + rows * dx_stride
        # Backwards: what was read last is found in cache.
        if whole * C < V:
            give_tile(
                x_row,
                dx_row,
                rest,
                wanted_lane,
                (rows < M) & (rest < V),
                m,
                rate,
                hit,
                spread,
                target,
                weight_ptr,
                softcap,
                SMOOTHING,
                SOFTCAP,
            )
        for i in range(0, whole):
            give_tile(
                x_row,
                dx_row,
                (whole - 1 - i) * C + lanes,
                wanted_lane,
                rows < M,
                m,
                rate,
                hit,
                spread,
                target,
                weight_ptr,
                softcap,
                SMOOTHING,
                SOFTCAP,
            )


@triton.jit(do_not_specialize=["M", "tiles", "ignore_index", "first"])
def cross_entropy_backward_kernel(
    dloss_ptr, dlse_ptr, x_ptr, targets_ptr, weight_ptr, weight_sum_ptr, denominator_ptr,
    lse_ptr, m_ptr, l_ptr, dx_ptr,
    x_stride, dx_stride, dloss_stride, M, N, V, first, tiles, ignore_index,
    smoothing, z_loss, softcap,
    DONE: tl.constexpr, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """dx [M, N] of columns first to first + N - 1 of V, from the gradients dloss of the losses (of
    stride 0 where it is one number) and dlse of lse.

    The programs take the tiles in turn.  DONE: dloss is one number, and if it is 1, dx holds the
    gradient already.
    """
    if DONE:
        if tl.load(dloss_ptr) == 1.0:
            return
    C: tl.constexpr = G * E
    lane = tl.arange(0, R * G)
    column_tiles = tl.cdiv(N, C)
    weights_here = weight_ptr
    if weight_ptr is not None:
        weights_here = weight_ptr + first
    W = weights_total(weight_sum_ptr, V)
    scale = 1.0
    if denominator_ptr is not None:
        scale = tl.div_rn(1.0, tl.load(denominator_ptr))
    for i in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # From the last row on: the forward pass left it in cache.
        tile = tiles - 1 - i
        row = (tile // column_tiles).to(tl.int64) * R + tl.arange(0, R)  # [R]
        rows = per_lane(row, R, G)
        cols = (tile % column_tiles) * C + tile_columns(lane, G, E, True)
        inside = row < M
        target, c, kept = target_of(targets_ptr, weight_ptr, row, inside, V, ignore_index)
        lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
        m = tl.load(m_ptr + row, mask=inside, other=0.0)
        l = tl.load(l_ptr + row, mask=inside, other=1.0)
        above = tl.load(dloss_ptr + row * dloss_stride, mask=inside, other=0.0).to(tl.float32) * scale
        a, hit = coefficients(lse, c, W, V, smoothing, z_loss, SMOOTHING)
        rate = tl.where(kept, a * above, 0.0)
        wanted = kept
        if dlse_ptr is not None:
            rate += tl.load(dlse_ptr + row, mask=inside, other=0.0)
            wanted = inside
        rate = per_lane(tl.where(wanted, rate / l, 0.0), R, G)
        hit = per_lane(tl.where(kept, hit * above, 0.0), R, G)
        spread = per_lane(tl.where(kept, smoothing / V * above, 0.0), R, G)
        # The mask of a whole tile leaves its loads and stores wide, whatever N is.
        mask = rows < M
        if (tile % column_tiles + 1) * C <= N:
            give_tile(
                x_ptr + rows * x_stride,
                dx_ptr + rows * dx_stride,
                cols,
                per_lane(wanted, R, G),
                mask,
                per_lane(m, R, G),
                rate,
                hit,
                spread,
                per_lane(target - first, R, G),
                weights_here,
                softcap,
                SMOOTHING,
                SOFTCAP,
            )
        else:
            give_tile(
                x_ptr + rows * x_stride,
                dx_ptr + rows * dx_stride,
                cols,
                per_lane(wanted, R, G),
                mask & (cols < N),
                per_lane(m, R, G),
                rate,
                hit,
                spread,
                per_lane(target - first, R, G),
                weights_here,
                softcap,
                SMOOTHING,
                SOFTCAP,
            )


@triton.jit(do_not_specialize=["M", "V", "ignore_index"])
def cross_entropy_total_kernel(
    targets_ptr,
    weight_ptr,
    loss_ptr,
    z_ptr,
    loss_sum_ptr,
    z_sum_ptr,
    denominator_ptr,
    M,
    V,
    ignore_index,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum loss and z over rows i * ROWS to (i + 1) * ROWS - 1, and the class weights of their targets,
    which make the denominator of the mean; without loss_ptr the weights alone.  MEAN divides, by NaN
    where the weights sum to 0, which is the denominator then."""
    losses = tl.zeros([BLOCK], tl.float32)
    zs = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for start in range(0, ROWS, BLOCK):
        row = first + start + tl.arange(0, BLOCK)
        inside = row < M
        target, c, _ = target_of(targets_ptr, weight_ptr, row, inside, V, ignore_index)
        weights += tl.where(target >= 0, c, 0.0)
        if loss_ptr is not None:
            losses += tl.load(loss_ptr + row, mask=inside, other=0.0)
            zs += tl.load(z_ptr + row, mask=inside, other=0.0)
    denominator = tl.sum(weights, 0)
    if MEAN:
        denominator = tl.where(denominator == 0.0, float("nan"), denominator)
    tl.store(denominator_ptr + tl.program_id(0), denominator)
    if loss_ptr is not None:
        loss = tl.sum(losses, 0)
        z = tl.sum(zs, 0)
        if MEAN:
            loss = tl.div_rn(loss, denominator)
            z = tl.div_rn(z, denominator)
        tl.store(loss_sum_ptr + tl.program_id(0), loss)
        tl.store(z_sum_ptr + tl.program_id(0), z)


@triton.jit(do_not_specialize=["N"])
def scale_unless_one_kernel(x_ptr, factor_ptr, N, BLOCK: tl.constexpr):
    """Multiply x [N] by a number on the device, in place; where it is 1 no memory is touched."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(x_ptr + at, rounded(x * factor, x_ptr.dtype.element_ty), mask=at < N)
