"""Attention on the portable kernels, backend "triton": launches.

Legend: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; out [B, Hq, Sq, Dv]; lse [B, Hq, Sq].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .. import configs
from ..kernels.attention_backward import (
    attention_backward_heads_kernel,
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_backward_rows_kernel,
)
from ..kernels.attention_backward_bias import (
    attention_backward_bias_kernel,
    attention_backward_distances_kernel,
    attention_backward_relative_kernel,
)
from ..kernels.attention_forward import attention_forward_kernel
from ..kernels.schedule import LIST, columns_kernel, intervals_kernel, order_lists_kernel
from ..kernels.scores import Given
from ..variant import Kind, Variant
from . import attention_split, private
from .attention_split import LOG2E, SMALLEST_SCALE, given_of
from .column_sums import column_sums
from .device import capability, cdiv, multiprocessors
from .hook_arguments import score_mod_arguments
from .recipe import New, Operand, Recipe

ROWS_BLOCK_M = 64


def is_wide(*tensors: Operand | None) -> bool:
    """Whether offsets inside the matrix of one batch entry and head, tiles' overhang included, can
    pass 2^31 elements."""
    for t in tensors:
        if t is not None:
            _, _, token, element = t.stride()
            if (t.shape[2] + 256) * token + 512 * element >= 2**31:
                return True
    return False


def constants(config: configs.AttentionConfig, q: Operand, Dv: int, kind: Kind) -> dict[str, Any]:
    """The constants that the kernels share, and the options."""
    D = q.shape[3]
    fits = configs.attention_takes_tf32(capability(q.device), D, Dv)
    return {
        "D": D,
        "DV": Dv,
        "BLOCK_D": configs.padded_head_dim(D),
        "BLOCK_DV": configs.padded_head_dim(Dv),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "KIND": kind,
        "TF32": q.dtype == torch.float32 and private.allows_tf32() and fits,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def user_functions(variant: Variant, backward: bool = True) -> dict[str, Any]:
    """The constants that are a score_mod's functions."""
    if variant.score_mod is None:
        return {}
    hook = variant.score_mod.hook
    made = {"SCORE_MOD": hook.forward, "SCORE_MOD_BACKWARD": hook.backward}
    return made if backward else {"SCORE_MOD": hook.forward}


def given_to(
    recipe: Recipe,
    variant: Variant,
    q: Operand,
    k: Operand,
    block_n: int,
    keeping: bool = True,
    **made: Operand | None,
) -> Any:
    """given_of for kernels with key tiles of block_n, what they make included, and the steps before.

    keeping: whether what these make is kept with a mask."""
    given = given_of(variant)
    if variant.kind.PLAIN:
        return given
    given = given._replace(**made)
    if variant.kind.BIAS:
        batch, head, row, column = given.bias.expand(*q.shape[:3], k.shape[2]).stride()
        given = given._replace(bias_batch=batch, bias_head=head, bias_row=row, bias_column=column)
    if variant.kind.SCORE_MOD:
        arguments = score_mod_arguments(given.score_mod, (*q.shape[:3], k.shape[2]))
        given = given._replace(score_mod=arguments)
    if variant.kind.INTERVALS:
        batch, heads, Sk = given.begin.shape
        n_tiles, rows = cdiv(Sk, block_n), batch * heads
        start = len(recipe.steps)
        tiles = recipe.make(New.contiguous((rows, 4, n_tiles), torch.int32, q.device))
        if rows * n_tiles:
            pair = given.begin, given.end
            recipe.launch(
                intervals_kernel, rows * n_tiles, *pair, tiles, Sk, BLOCK_N=block_n, num_warps=1
            )
        if keeping:
            recipe.keep(start, tiles, given.begin, ("tiles", block_n))
        given = given._replace(work=tiles)
    if variant.kind.VARLEN:
        sizes = given.cu_seqlens_q.shape[0] - 1, q.shape[2], k.shape[2]
        sequences, queries, keys = (2 * n + 1 for n in sizes)  # see `counts` of kernels/scores.py
        given = given._replace(sequences=sequences, queries=queries, keys=keys)
    return given


def columns_for(
    recipe: Recipe,
    variant: Variant,
    given: Any,
    q: Operand,
    k: Operand,
    block_m: int,
    block_n: int,
    marked: bool = False,
) -> Operand:
    """Which query tiles each key tile visits, by a mask's table; kept with it.  marked: see
    columns_kernel."""
    batch, heads, *_ = given.table.shape
    Sq, Sk = lengths(variant, q, k)
    key_tiles = cdiv(Sk, block_n)
    start = len(recipe.steps)
    shape = (batch * heads, key_tiles, (LIST.value if marked else 1) + cdiv(Sq, block_m))
    columns = recipe.make(New.contiguous(shape, torch.int32, q.device))
    # The kernel is compiled for bands, and given no more than these.
    own = variant.kind
    kind = Kind(CAUSAL=own.CAUSAL, WINDOW=own.WINDOW, FIRST=own.FIRST)
    bands = () if kind.PLAIN else Given(left=given.left, first=given.first)
    if lists := batch * heads * key_tiles:
        recipe.launch(
            columns_kernel,
            lists,
            columns,
            given.table,
            Sq,
            Sk,
            variant.offset,
            bands,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            KIND=kind,
            MARKED=marked,
            num_warps=1,
        )
        if marked:
            recipe.launch(order_lists_kernel, lists, columns, *shape[1:], BLOCK=256, num_warps=1)
    band = variant.offset, kind, given.left, given.first
    recipe.keep(start, columns, given.table, ("columns", band, block_m, block_n, marked))
    return columns


def programs(variant: Variant, tokens: int, block: int, heads: int) -> int:
    """One for each tile of a head, or of sequences each slot that a tile may take."""
    if variant.kind.VARLEN:
        sequences = variant.named["cu_seqlens_q"].shape[0] - 1
        return (tokens // block + sequences + 1) * heads
    return cdiv(tokens, block) * heads


def lengths(variant: Variant, q: Operand, k: Operand) -> tuple[int, int]:
    """Sq and Sk as arguments; those of sequences are on the device."""
    return (0, 0) if variant.kind.VARLEN else (q.shape[2], k.shape[2])


def forward(
    recipe: Recipe,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    variant: Variant,
    scale: float,
    num_splits: int = 0,
    max_score: Operand | None = None,
    entropy: Operand | None = None,
    rest: Operand | None = None,
) -> None:
    """Fill out, lse, the statistics that are not None, of some elements, and what rounding takes from
    out or lse, if it is not None.  num_splits: of the keys at most; 0, as many as are best."""
    B, Hq, Sq, D = q.shape
    _, Hkv, _, Dv = v.shape
    if num_splits != 1 and attention_split.splits_keys(q, k, variant):
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        variant = variant._replace(offset=variant.offset - (k.shape[1] - Sq))
        cache = attention_split.Cache()
        if rest is not None:  # of lse, which these kernels do not keep
            rest.zero_()
        attention_split.launch(recipe, q, k, v, out, lse, cache, variant, scale, num_splits)
        return
    of_heads = capability(q.device), q.element_size(), D, Dv
    config = configs.attention_forward(*of_heads, variant.kind, variant.dense)
    made: dict[str, Any] = {"max_score": max_score, "entropy": entropy, "rest": rest}
    given = given_to(recipe, variant, q, k, config.block_n, **made)
    recipe.launch(
        attention_forward_kernel,
        programs(variant, Sq, config.block_m, B * Hq),
        q,
        k,
        v,
        out,
        lse,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *out.stride(),
        Hq,
        Hq // Hkv,
        *lengths(variant, q, k),
        variant.offset,
        max(scale, SMALLEST_SCALE) * LOG2E,
        given,
        EXACT=q.dtype == torch.float32,
        WIDE=is_wide(q, k, v, out),
        **user_functions(variant, backward=False),
        **constants(config, q, Dv, variant.kind),
    )


def backward(
    recipe: Recipe,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    dout: Operand,
    dlse: Operand | None,
    dq: Operand | None,
    dk: Operand | None,
    dv: Operand | None,
    variant: Variant,
    scale: float,
    ordered: bool,
    sinks: Operand | None = None,
    alibi_slopes: Operand | None = None,
    bias: Operand | None = None,
    relative_bias: Operand | None = None,
    score_mod: Sequence[Operand | None] = (),
    entropy: tuple[Operand, Operand] | None = None,
    rest: Operand | None = None,
) -> None:
    """Fill those of the gradients that are not None; lse is contiguous, dk and dv have the same
    strides.  ordered: they are summed in a fixed order here anyway.  sinks, alibi_slopes, bias,
    relative_bias: the gradients of these; score_mod: those of its operands.  entropy: that of the rows,
    and its gradient.  rest: of out or lse."""
    B, Hq, Sq, D = q.shape
    _, Hkv, Sk, Dv = v.shape
    block_m = ROWS_BLOCK_M if Dv <= 256 else ROWS_BLOCK_M // 2
    kind = replace(variant.kind, MAX_SCORE=False, ENTROPY=entropy is not None)
    variant = variant._replace(kind=kind) if not kind.PLAIN else Variant(kind, variant.offset)
    of_heads = capability(q.device), q.element_size(), D, Dv
    for_keys, for_queries = configs.attention_backward(
        *of_heads, kind, alibi_slopes is not None, variant.dense
    )
    rows = New.contiguous(lse.shape, lse.dtype, lse.device)
    lse2, delta = recipe.make(rows), recipe.make(rows)
    slope_sums = None if alibi_slopes is None else recipe.make(rows)
    Sq_given, Sk_given = lengths(variant, q, k)
    sizes = (
        Hq,
        Hq // Hkv,
        Sq_given,
        Sk_given,
        variant.offset,
        max(scale, SMALLEST_SCALE) * LOG2E,
        scale,
    )
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    wide = is_wide(q, k, v, out, dout, dq, dk, dv)
    more: dict[str, Any] = {"slope_sums": slope_sums}
    of_sinks = delta
    if entropy is not None:
        more |= {"entropy": entropy[0], "entropy_gradient": entropy[1]}
        more["entropy_weights"] = recipe.make(rows)
        if sinks is not None:
            more["sink_delta"] = of_sinks = recipe.make(rows)
    # A bias of all pairs has dS for its gradient, which is written beside dQ.
    of_pairs = bias is not None and (*(1,) * (4 - bias.ndim), *bias.shape) == (B, Hq, Sq, Sk)
    summed = relative_bias is not None or (bias is not None and not of_pairs)
    summed = summed or any(x is not None for x in score_mod)
    # Delta of an exact sum, before all else; or, where dQ of 16 bits can do without, beside dQ.
    short = q.element_size() == 2
    dropped = short and kind.DROPOUT and rest is None
    anew = dropped or of_pairs or summed
    before = anew and (dropped or of_pairs or not short)
    if rest is not None and not short:
        more["rest"] = rest
    if anew:
        more["beside_delta"] = recipe.make(rows)
    ends, of_distances = None, 0
    sums = configs.attention_sums_ends(*of_heads[:2], kind)
    if relative_bias is not None and sums:
        of_distances = configs.attention_backward_distances(*of_heads, kind).block_m
        shape = B * Hq, 2 * programs(variant, Sq, for_queries.block_m, 1)
        more["ends"] = ends = recipe.make(New.contiguous(shape, torch.float32, q.device))
    given = given_to(recipe, variant, q, k, for_queries.block_n, **more)
    recipe.launch(
        attention_backward_rows_kernel,
        cdiv(Sq, block_m) * B * Hq,
        out,
        dout,
        lse,
        dlse,
        lse2,
        delta,
        *out.stride(),
        *dout.stride(),
        *((0, 0, 0) if dlse is None else dlse.stride()),
        Hq,
        Sq_given,
        given._replace(rest=rest) if rest is not None and short else given,
        KIND=kind,
        HAS_DLSE=dlse is not None,
        SLOPES=slope_sums is not None,
        WIDE=wide,
        DV=Dv,
        BLOCK_DV=configs.padded_head_dim(Dv),
        BLOCK_M=block_m,
        num_warps=4,
    )
    tensors = q, k, v, dout, lse2, delta

    def launch_queries(dq: Operand | None, given: Any, delta_too: int) -> None:
        config = for_queries
        if delta_too == 2:
            config = configs.attention_delta(*of_heads, for_queries)
        recipe.launch(
            attention_backward_queries_kernel,
            programs(variant, Sq, config.block_m, B * Hq),
            *tensors,
            dq,
            *strides,
            *((0, 0, 0, 0) if dq is None else dq.stride()),
            *sizes,
            given,
            WIDE=wide,
            SLOPES=slope_sums is not None and dq is not None,
            DELTA=delta_too,
            ENDS=of_distances if delta_too else 0,
            **user_functions(variant),
            **constants(config, q, Dv, kind),
        )

    if dq is None and (slope_sums is not None or of_pairs):
        dq = recipe.make(New.contiguous(q.shape, q.dtype, q.device))
    beside_dq = anew and not before
    if beside_dq:
        launch_queries(dq, given, 2 if dq is None else 1)
    elif before:
        launch_queries(None, given, 2)
    if dk is not None and dv is not None:
        for_dk = given
        if kind.TABLE:
            tiles = for_keys.block_m, for_keys.block_n
            for_dk = given._replace(columns=columns_for(recipe, variant, given, q, k, *tiles))
        recipe.launch(
            attention_backward_keys_kernel,
            programs(variant, Sk, for_keys.block_n, B * Hkv),
            q,
            k,
            v,
            dout,
            lse2,
            delta,
            dk,
            dv,
            *strides,
            *dk.stride(),
            *dv.stride(),
            *sizes,
            for_dk,
            WIDE=wide,
            **user_functions(variant),
            **constants(for_keys, q, Dv, kind),
        )
    scores = Scores(variant, tensors, strides, sizes[:-1], given, wide)
    if bias is not None and of_pairs:
        if kind.CAUSAL or kind.WINDOW or kind.INTERVALS or kind.TABLE:  # not all tiles are visited
            bias.zero_()
        given = given._replace(bias_gradient=bias, heads=Hq)
    elif bias is not None:
        backward_bias(recipe, scores, bias)
    if relative_bias is not None:
        backward_relative_bias(recipe, scores, relative_bias, ends)
    for i, gradient in enumerate(score_mod):
        if gradient is not None:
            backward_bias(recipe, scores, gradient, result=i + 1)
    if dq is not None and not beside_dq:
        launch_queries(dq, given, 0)
    for gradient, terms in ((sinks, of_sinks), (alibi_slopes, slope_sums)):
        if gradient is not None:
            recipe.launch(
                attention_backward_heads_kernel,
                Hq,
                terms,
                lse2,
                variant.named.get("sinks"),
                gradient,
                Hq,
                B,
                Sq_given,
                given,
                KIND=kind,
                SINKS=terms is of_sinks,
                BLOCK=1024,
                num_warps=4,
            )


class Scores(NamedTuple):
    """What kernels make dS of once more, beside recipe and gradient: their arguments."""

    variant: Variant
    tensors: tuple[Operand, ...]  # q, k, v, dout, lse2 and delta
    strides: tuple[int, ...]  # of the first four
    sizes: tuple[Any, ...]
    given: Any
    wide: bool


def backward_bias(recipe: Recipe, scores: Scores, gradient: Operand, result: int = 0) -> None:
    """Fill the gradient of a bias that is broadcast, or of a score_mod's operand: see RESULT of the
    kernel.  Sums over tiles of queries or keys are made in as many parts as the card has work for."""
    q, _, v, *_ = scores.tensors
    (B, Hq, Sq, D), (_, _, Sk, Dv) = q.shape, v.shape
    if not Sk:
        gradient.zero_()
        return
    kind = scores.variant.kind
    of_heads = capability(q.device), q.element_size(), D, Dv
    config = configs.attention_backward_bias(*of_heads, kind, scores.variant.dense)
    shape = (*(1,) * (4 - gradient.ndim), *gradient.shape)
    batch, heads, rows, columns = (n == size for n, size in zip(shape, (B, Hq, Sq, Sk), strict=True))
    entries = (B if batch else 1) * (Hq if heads else 1)
    i_tiles, j_tiles = cdiv(Sq, config.block_m), cdiv(Sk, config.block_n)
    own = entries * (i_tiles if rows else 1) * (j_tiles if columns else 1)
    wanted = max(1, 4 * multiprocessors(q.device) // own)  # parts of the tiles that are summed over
    i_parts, j_parts = min(wanted, i_tiles), min(wanted, j_tiles)
    per_row = 1 if rows else cdiv(i_tiles, i_parts)
    per_column = 1 if columns else j_tiles if not rows else cdiv(j_tiles, j_parts)
    parts = (1 if rows else cdiv(i_tiles, per_row)) * (1 if columns else cdiv(j_tiles, per_column))
    made = gradient
    if parts > 1:
        N = entries * (Sq if rows else 1) * (Sk if columns else 1)
        made = recipe.make(New.contiguous((parts, N), torch.float32, q.device))
    recipe.launch(
        attention_backward_bias_kernel,
        entries * cdiv(i_tiles, per_row) * cdiv(j_tiles, per_column),
        *scores.tensors,
        made,
        *scores.strides,
        B,
        *scores.sizes,
        per_row,
        per_column,
        scores.given,
        WIDE=scores.wide,
        BATCH=batch,
        HEADS=heads,
        ROWS=rows,
        COLUMNS=columns,
        RESULT=result,
        **user_functions(scores.variant),
        **constants(config, q, Dv, kind),
    )
    if parts > 1:
        column_sums(recipe, (made, None), (gradient, None))


def backward_relative_bias(
    recipe: Recipe, scores: Scores, gradient: Operand, ends: Operand | None
) -> None:
    """Fill the gradient of a bias by distance [Hq | 1, R].  ends: what the kernel of dQ has summed for
    its first and last column [B * Hq, programs * 2]."""
    q, _, v, *_ = scores.tensors
    (B, Hq, Sq, D), (_, _, Sk, Dv) = q.shape, v.shape
    kind = scores.variant.kind
    config = configs.attention_backward_distances(capability(q.device), q.element_size(), D, Dv, kind)
    values = constants(config, q, Dv, kind)
    block = values.pop("BLOCK_M")
    del values["BLOCK_N"]
    diagonals = programs(scores.variant, Sq, block, 1)
    diagonals += programs(scores.variant, Sk, block, 1)
    rows, R = gradient.shape
    width = 2 * block + 2
    sums = recipe.make(New.contiguous((B * Hq, diagonals * width), torch.float32, q.device))
    columns = recipe.make(New.contiguous((diagonals,), torch.int32, q.device))
    recipe.launch(
        attention_backward_distances_kernel,
        B * Hq * diagonals,
        *scores.tensors,
        sums,
        columns,
        *scores.strides,
        *scores.sizes,
        scores.given,
        WIDE=scores.wide,
        BLOCK=block,
        ENDS=ends is not None,
        **user_functions(scores.variant),
        **values,
    )

    def of_row(sums: Operand) -> Operand:
        """Those of what shares a row of the table, [B * Hq, N], added."""
        shared, N = B * Hq // rows, sums.shape[1]
        if shared == 1:
            return sums
        whole = recipe.make(New.contiguous((rows * N,), torch.float32, q.device))
        partials = sums.part(0, torch.float32, shared, rows * N)
        column_sums(recipe, (partials, None), (whole, None))
        return whole

    recipe.launch(
        attention_backward_relative_kernel,
        rows * cdiv(R, 32),
        of_row(sums),
        columns,
        None if ends is None else of_row(ends),
        gradient,
        diagonals,
        0 if ends is None else ends.shape[1] // 2,
        R,
        BLOCK=block,
        LOOKED_AT=32,
        COLUMNS=32,
        num_warps=4,
    )
