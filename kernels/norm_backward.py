"""Backward of LayerNorm and RMSNorm, with fused residual add and hooks; see norm.py for the forward.

With g = dy * weight and averages over the N columns of the row:

    dx = rstd * (g - xhat * average(g * xhat) - average(g))        (the last term only if CENTERED)
    dweight = sum over rows of dy * xhat        dbias = sum over rows of dy

and the gradient of total, where a residual was added, is that dx plus the gradient that reaches
total from elsewhere (dtotal).  dweight and dbias are summed in two steps of fixed order: every
program adds up its rows in registers and writes one float32 row of partial sums, and
column_sums_kernel adds those.  The widest rows leave one program for all of them: in float32 these
are summed by blocks of rows, so that rounding adds up over fewer sums.

The regimes are those of the forward.  In norm_backward_kernel a few programs a multiprocessor take many
tiles of R whole rows each, so that there are few partial sums, and load the next tiles meanwhile.
Where there are clusters, the programs of a cluster share wide rows.  In norm_backward_split_kernel a
program keeps to C columns and walks down the rows.  The programs of a row exchange their parts of the
two averages (exchange.py).  They publish those of the next row before they read this row's, and load
one more row meanwhile.

The statistics are those that the forward has kept.  Without them norm_backward_kernel computes them
again from the rows that it loads in any case, so the forward of narrow rows need not keep any.

Hooks: dy passes EPILOGUE's derivative before all this, dx that of PROLOGUE after it.  PROLOGUE itself
is applied again to x where the sum with a residual has not kept its result.

Legend: as in norm.py; dy, dtotal, input [M, N] with unit column stride and a row stride of their own;
dx, dresidual [M, N] contiguous; used as words, or None; P programs; G groups of programs; x is total
where there is one, and input the x of the forward where the derivative of PROLOGUE reads it beside
total.
"""

# ruff: noqa: RUF005  (Triton has no starred expressions in tuples)

import triton
import triton.language as tl

from .cluster import cluster_begin, cluster_exchange
from .exchange import clear, collect, pack, publish, unpack
from .hooks import apply_hook, apply_hook_backward
from .moments import sums_of_both
from .norm import SHORT, columns_of, hold_rows, mean_of_chunks, scaled
from .rounding import load, rounded, store

BLOCK_ROWS = tl.constexpr(4)  # few: tensors of such wide rows have few rows


@triton.jit
def rows_of(tile, R: tl.constexpr, CLUSTER: tl.constexpr):
    """The rows [R] of a tile: R of them, or one that the R = CLUSTER programs of a cluster share."""
    if CLUSTER == 1:
        return tl.cast(tile, tl.int64) * R + tl.arange(0, R)
    else:
        tl.static_assert(R == CLUSTER)
        return tl.cast(tile, tl.int64) + tl.zeros([R], tl.int64)


@triton.jit
def there(rows, M, inside, CLUSTER: tl.constexpr):
    """Which elements of a tile exist; the row of a cluster always does."""
    return inside if CLUSTER > 1 else (rows < M) & inside


@triton.jit
def load_statistics(mean_ptr, rstd_ptr, row, M):
    """mean (0 where there is none) and rstd of rows [R], each [R, 1]."""
    rstd = load(rstd_ptr, row, row < M)[:, None]
    if mean_ptr is not None:
        return load(mean_ptr, row, row < M)[:, None], rstd
    else:
        return tl.zeros(rstd.shape, tl.float32), rstd


@triton.jit
def normalize(x, mean, rstd, CENTERED: tl.constexpr):
    """xhat [R, C] in float32."""
    x = x.to(tl.float32)
    if CENTERED:
        x -= mean
    return x * rstd


@triton.jit
def load_tile(
    dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, bias_ptr, mean, rstd,
    prologue, epilogue, epilogue_gradients,
    CENTERED: tl.constexpr, CASTING: tl.constexpr, PROLOGUE: tl.constexpr,
    EPILOGUE_BACKWARD: tl.constexpr, rows, cols, mask, M, N,
):  # fmt: skip
    """What was normalized, and the gradient of scale and shift, [R, C] each: as in memory, or in
    float32 after the hooks."""
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0)
    if PROLOGUE is not None:
        x = apply_hook(PROLOGUE, prologue, x.to(tl.float32), rows, cols, M, N)
        x = tl.where(mask, x, 0.0)
    if EPILOGUE_BACKWARD is not None:
        y = normalize(x, mean, rstd, CENTERED)
        if weight_ptr is not None:
            y = scaled(y, load(weight_ptr, cols, cols < N), CASTING, x_ptr.dtype.element_ty)
        if bias_ptr is not None:
            y += load(bias_ptr, cols, cols < N)
        dy = apply_hook_backward(
            EPILOGUE_BACKWARD, epilogue, epilogue_gradients, dy.to(tl.float32), y, rows, cols, M, N
        )
        dy = tl.where(mask, dy, 0.0)
    return x, dy


@triton.jit
def through_scale(dy, xhat, weight_ptr, weight, CASTING: tl.constexpr, dtype: tl.constexpr):
    """The gradient g of xhat, and the term of dweight; weight is a tile if weight_ptr is not None."""
    g = dy.to(tl.float32)
    if CASTING == "llama":
        xhat = rounded(xhat, dtype).to(tl.float32)
    dweight = g * xhat
    if weight_ptr is not None:
        g *= weight.to(tl.float32) + 1 if CASTING == "gemma" else weight.to(tl.float32)
    return g, dweight


@triton.jit
def sums_of_rows(g_xhat, g, CENTERED: tl.constexpr):
    """Sums [R] over the columns of g * xhat and, if CENTERED, of g."""
    if CENTERED:
        return sums_of_both(g_xhat, g)
    else:
        return tl.sum(g_xhat, 1), tl.zeros([g.shape[0]], tl.float32)


@triton.jit
def store_dx(
    dx,
    dtotal_ptr,
    dtotal_stride,
    dx_ptr,
    dresidual_ptr,
    input_ptr,
    input_stride,
    prologue,
    prologue_gradients,
    PROLOGUE_BACKWARD: tl.constexpr,
    rows,
    cols,
    mask,
    M,
    N,
):
    """Add the gradient that reaches total from elsewhere; dx is what passes through PROLOGUE, and
    dresidual what does not, or dx in another dtype."""
    if dtotal_ptr is not None:
        dx += load(dtotal_ptr, rows * dtotal_stride + cols, mask)
    if dresidual_ptr is not None:
        store(dresidual_ptr, rows * N + cols, dx, mask)
    if PROLOGUE_BACKWARD is not None:
        x = dx  # to take its place where the derivative does not read it
        if input_ptr is not None:
            x = load(input_ptr, rows * input_stride + cols, mask)
        dx = apply_hook_backward(
            PROLOGUE_BACKWARD, prologue, prologue_gradients, dx, x, rows, cols, M, N
        )
    store(dx_ptr, rows * N + cols, dx, mask)


@triton.jit
def store_partial(
    ptr, sums, chunk, N, C: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, CLUSTER: tl.constexpr
):
    """Write the partial sums of a chunk of columns, [R, C] in registers."""
    if CLUSTER == 1:
        col = chunk * C + tl.arange(0, C)
        tl.store(ptr + col, tl.sum(sums, 0), mask=col < N)
    else:
        cols, inside = columns_of(chunk, N, C, WHOLE, K, CLUSTER)
        tl.store(ptr + cols, sums, mask=inside)


@triton.jit(do_not_specialize=["M"])
def norm_backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, input_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,  # in
    dx_ptr, dresidual_ptr,  # out
    dweight_ptr, dbias_ptr,  # out [P, N] float32, one row of partial sums a program
    dy_stride, dtotal_stride, x_stride, input_stride, M, N, eps,
    prologue, prologue_gradients, epilogue, epilogue_gradients,
    CENTERED: tl.constexpr, CASTING: tl.constexpr,
    PROLOGUE: tl.constexpr, PROLOGUE_BACKWARD: tl.constexpr, EPILOGUE_BACKWARD: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    CLUSTER: tl.constexpr = 1,
):  # fmt: skip
    """Program p takes every P-th tile of R rows, starting with tile p.

    Without a rstd_ptr it computes the statistics again, with the forward's eps.
    """
    # Beside the partial sums of wide rows there are no registers for the weights: they stay in the
    # cache.
    HELD: tl.constexpr = K * C <= 8192
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weights, dweights, dbiases = (), (), ()
    for k in tl.static_range(K):
        cols, inside = columns_of(k, N, C, WHOLE, K, CLUSTER)
        if HELD and weight_ptr is not None:
            weights = weights + (tl.load(weight_ptr + cols, mask=inside, other=0.0),)
        else:
            weights = weights + (0.0,)
        if dweight_ptr is not None:
            dweights = dweights + (tl.zeros([R, C], tl.float32),)
        if dbias_ptr is not None:
            dbiases = dbiases + (tl.zeros([R, C], tl.float32),)

    tiles = M if CLUSTER > 1 else tl.cdiv(M, R)
    exchanges = 0
    if CLUSTER > 1:
        mailbox = cluster_begin()
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        row = rows_of(tile, R, CLUSTER)  # [R]
        rows = row[:, None]
        if rstd_ptr is None:
            tl.static_assert(CLUSTER == 1 and PROLOGUE is None and EPILOGUE_BACKWARD is None)
            held, mean, rstd, _ = hold_rows(
                x_ptr, x_stride, None, 0, None, (), None, rows, M, N, eps, CENTERED, C, K, WHOLE
            )
            mean, rstd = mean[:, None], tl.where(rows < M, rstd[:, None], 0.0)
        else:
            mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M)
        xs, dys = (), ()
        g_xhat, g_alone = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
        for k in tl.static_range(K):
            cols, inside = columns_of(k, N, C, WHOLE, K, CLUSTER)
            if rstd_ptr is None:
                x = held[k]
                dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=(rows < M) & inside, other=0.0)
            else:
                x, dy = load_tile(
                    dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, bias_ptr, mean, rstd,
                    prologue, epilogue, epilogue_gradients, CENTERED, CASTING,
                    PROLOGUE, EPILOGUE_BACKWARD, rows, cols, there(rows, M, inside, CLUSTER), M, N,
                )  # fmt: skip
                if CENTERED and mean_ptr is not None and K * C <= SHORT and x.dtype == tl.float32:
                    x -= mean  # the mean is now what its rounding left out; see norm.py
                    mean = mean_of_chunks((x,), tl.zeros([R], tl.float32) + N, N, C, WHOLE)[:, None]
            xs, dys = xs + (x,), dys + (dy,)
            xhat = normalize(x, mean, rstd, CENTERED)
            # dy is 0 outside the mask, and with it g: the sums need no mask of their own.
            weight = weights[k]
            if not HELD and weight_ptr is not None:
                weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
            g, _ = through_scale(dy, xhat, weight_ptr, weight, CASTING, dtype)
            g_xhat += g * xhat
            g_alone += g
        average_g_xhat, average_g = sums_of_rows(g_xhat, g_alone, CENTERED)
        if CLUSTER > 1:
            parts_g_xhat, parts_g = cluster_exchange(
                mailbox, average_g_xhat, average_g, exchanges, CLUSTER
            )
            average_g_xhat, average_g = sums_of_rows(parts_g_xhat, parts_g, CENTERED)
            exchanges += 1
        average_g_xhat, average_g = (average_g_xhat / N)[:, None], (average_g / N)[:, None]

        dweights_now, dbiases_now = (), ()
        for k in tl.static_range(K):
            cols, inside = columns_of(k, N, C, WHOLE, K, CLUSTER)
            xhat = normalize(xs[k], mean, rstd, CENTERED)
            weight = weights[k]
            if not HELD and weight_ptr is not None:
                weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
            g, dweight = through_scale(dys[k], xhat, weight_ptr, weight, CASTING, dtype)
            dx = g - xhat * average_g_xhat
            if CENTERED:
                dx -= average_g
            if dweight_ptr is not None:
                dweights_now = dweights_now + (dweights[k] + dweight,)
            if dbias_ptr is not None:
                dbiases_now = dbiases_now + (dbiases[k] + dys[k].to(tl.float32),)
            store_dx(
                dx * rstd,
                dtotal_ptr,
                dtotal_stride,
                dx_ptr,
                dresidual_ptr,
                input_ptr,
                input_stride,
                prologue,
                prologue_gradients,
                PROLOGUE_BACKWARD,
                rows,
                cols,
                there(rows, M, inside, CLUSTER),
                M,
                N,
            )
        dweights, dbiases = dweights_now, dbiases_now

    partial = program.to(tl.int64) * N
    for k in tl.static_range(K):
        if dweight_ptr is not None:
            store_partial(dweight_ptr + partial, dweights[k], k, N, C, WHOLE, K, CLUSTER)
        if dbias_ptr is not None:
            store_partial(dbias_ptr + partial, dbiases[k], k, N, C, WHOLE, K, CLUSTER)


@triton.jit
def add(total, block, x, ends, BLOCKS: tl.constexpr):
    """Adds x to a sum, which is total + block: to the total, or if BLOCKS to the block, which is added
    to the total where it `ends`."""
    if BLOCKS:
        block += x
        if ends:
            total += block
            block = tl.zeros_like(block)
        return total, block
    else:
        return total + x, block


@triton.jit
def publish_sums(
    words_ptr,
    split,
    x,
    dy,
    weight_ptr,
    weight,
    mean,
    rstd,
    CENTERED: tl.constexpr,
    CASTING: tl.constexpr,
    dtype: tl.constexpr,
):
    """Publish to the programs of a row what one split adds to its two sums."""
    xhat = normalize(x, mean, rstd, CENTERED)
    g, _ = through_scale(dy, xhat, weight_ptr, weight, CASTING, dtype)
    g_xhat, g_alone = sums_of_rows(g * xhat, g, CENTERED)
    publish(words_ptr, split, pack(g_xhat, g_alone))


@triton.jit(do_not_specialize=["M", "G"])
def norm_backward_split_kernel(
    dy_ptr, dtotal_ptr, x_ptr, input_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,  # in
    dx_ptr, dresidual_ptr,  # out
    dweight_ptr, dbias_ptr,  # out [G, N] float32, one row of partial sums a group
    words_ptr, used_ptr,
    dy_stride, dtotal_stride, x_stride, input_stride, M, N, G,
    prologue, prologue_gradients, epilogue, epilogue_gradients,
    CENTERED: tl.constexpr, CASTING: tl.constexpr,
    PROLOGUE: tl.constexpr, PROLOGUE_BACKWARD: tl.constexpr, EPILOGUE_BACKWARD: tl.constexpr,
    C: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """Program i takes split i % splits of every G-th row, starting with row i // splits."""
    splits = tl.cdiv(N, C)
    group = tl.program_id(0) // splits
    own = tl.program_id(0) % splits
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    one = tl.arange(0, 1)
    cols, inside = columns_of(own, N, C, WHOLE)
    weight = 0.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    BLOCKS: tl.constexpr = dtype == tl.float32 and C > 1024
    dweights, dweights_block = tl.zeros([1, C], tl.float32), tl.zeros([1, C], tl.float32)
    dbiases, dbiases_block = tl.zeros([1, C], tl.float32), tl.zeros([1, C], tl.float32)
    in_block = 0

    # Three rows are in flight: one waits for its words, the next publishes its own, one is loaded.
    row = group.to(tl.int64) + one  # [1]
    mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M)
    x, dy = load_tile(
        dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, bias_ptr, mean, rstd,
        prologue, epilogue, epilogue_gradients, CENTERED, CASTING, PROLOGUE, EPILOGUE_BACKWARD,
        row[:, None], cols, inside, M, N,
    )  # fmt: skip
    mean_next, rstd_next = load_statistics(mean_ptr, rstd_ptr, row + G, M)
    x_next, dy_next = load_tile(
        dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, bias_ptr, mean_next, rstd_next,
        prologue, epilogue, epilogue_gradients, CENTERED, CASTING, PROLOGUE, EPILOGUE_BACKWARD,
        row[:, None] + G, cols, (row[:, None] + G < M) & inside, M, N,
    )  # fmt: skip
    publish_sums(
        words_ptr + group.to(tl.int64) * splits,
        own,
        x,
        dy,
        weight_ptr,
        weight,
        mean,
        rstd,
        CENTERED,
        CASTING,
        dtype,
    )
    for number in tl.range(group, M, G, num_stages=1):
        row = tl.cast(number, tl.int64) + one
        rows = row[:, None]
        row_words_ptr = words_ptr + tl.cast(number, tl.int64) * splits
        if used_ptr is not None:
            clear(used_ptr + tl.cast(number, tl.int64) * splits, own)
        later = row + 2 * tl.cast(G, tl.int64)
        mean_later, rstd_later = load_statistics(mean_ptr, rstd_ptr, later, M)
        x_later, dy_later = load_tile(
            dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, bias_ptr, mean_later, rstd_later,
            prologue, epilogue, epilogue_gradients, CENTERED, CASTING, PROLOGUE, EPILOGUE_BACKWARD,
            later[:, None], cols, (later[:, None] < M) & inside, M, N,
        )  # fmt: skip
        if number + G < M:
            publish_sums(
                row_words_ptr + tl.cast(G, tl.int64) * splits,
                own,
                x_next,
                dy_next,
                weight_ptr,
                weight,
                mean_next,
                rstd_next,
                CENTERED,
                CASTING,
                dtype,
            )

        mean, rstd = load_statistics(mean_ptr, rstd_ptr, row, M)
        words, missing = collect(row_words_ptr, splits, LANES, POLLS)
        split = own
        while missing > 0:  # others are late: their splits too, its own again, and one more look
            split = tl.where(split + 1 < splits, split + 1, 0)
            cols_there, inside_there = columns_of(split, N, C, WHOLE)
            x, dy = load_tile(
                dy_ptr, dy_stride, x_ptr, x_stride, weight_ptr, bias_ptr, mean, rstd,
                prologue, epilogue, (), CENTERED, CASTING, PROLOGUE, EPILOGUE_BACKWARD,
                rows, cols_there, inside_there, M, N,
            )  # fmt: skip
            weight_there = 0.0
            if weight_ptr is not None:
                weight_there = tl.load(weight_ptr + cols_there, mask=inside_there, other=0.0)
            publish_sums(
                row_words_ptr,
                split,
                x,
                dy,
                weight_ptr,
                weight_there,
                mean,
                rstd,
                CENTERED,
                CASTING,
                dtype,
            )
            if split == own:
                words, missing = collect(row_words_ptr, splits, LANES, POLLS)
        g_xhat, g_alone = unpack(words)
        here = tl.arange(0, LANES) < splits
        average_g_xhat = tl.sum(tl.where(here, g_xhat, 0.0), 0) / N
        average_g = tl.sum(tl.where(here, g_alone, 0.0), 0) / N

        xhat = normalize(x, mean, rstd, CENTERED)
        g, dweight = through_scale(dy, xhat, weight_ptr, weight, CASTING, dtype)
        dx = g - xhat * average_g_xhat
        if CENTERED:
            dx -= average_g
        in_block = tl.where(in_block + 1 < BLOCK_ROWS, in_block + 1, 0)
        ends = in_block == 0
        if dweight_ptr is not None:
            dweights, dweights_block = add(dweights, dweights_block, dweight, ends, BLOCKS)
        if dbias_ptr is not None:
            dbiases, dbiases_block = add(dbiases, dbiases_block, dy.to(tl.float32), ends, BLOCKS)
        store_dx(
            dx * rstd,
            dtotal_ptr,
            dtotal_stride,
            dx_ptr,
            dresidual_ptr,
            input_ptr,
            input_stride,
            prologue,
            prologue_gradients,
            PROLOGUE_BACKWARD,
            rows,
            cols,
            inside,
            M,
            N,
        )
        x, dy = x_next, dy_next
        mean_next, rstd_next, x_next, dy_next = mean_later, rstd_later, x_later, dy_later

    if BLOCKS:
        dweights += dweights_block
        dbiases += dbiases_block
    partial = group.to(tl.int64) * N + cols
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, dweights, mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, dbiases, mask=inside)


@triton.jit
def column_sum(partial_ptr, out_ptr, tile, P, N, R: tl.constexpr, C: tl.constexpr):
    """out [N] = the sum over the P rows of partial [P, N], columns tile * C to tile * C + C - 1."""
    cols = tile * C + tl.arange(0, C)[None, :]  # [1, C]
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, P, R):
        rows = start + tl.arange(0, R)[:, None]
        total += load(partial_ptr, rows.to(tl.int64) * N + cols, (rows < P) & (cols < N))
    col = tile * C + tl.arange(0, C)
    store(out_ptr, col, tl.sum(total, 0), col < N)


@triton.jit(do_not_specialize=["P"])
def column_sums_kernel(
    dweight_partial_ptr,
    dbias_partial_ptr,  # in [P, N] float32
    dweight_ptr,
    dbias_ptr,  # out [N]
    P,
    N,
    R: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """The second step of dweight and dbias, one tile of columns a program: first the tiles of dweight.

    PDL: the launch is a dependent one (launch_pdl), which begins when the launch before ends, and waits
    for what that launch has written.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    tiles = tl.cdiv(N, C)
    if dweight_ptr is not None:
        if tile < tiles:
            column_sum(dweight_partial_ptr, dweight_ptr, tile, P, N, R, C)
        tile -= tiles
    if dbias_ptr is not None:
        if tile >= 0:
            column_sum(dbias_partial_ptr, dbias_ptr, tile, P, N, R, C)
