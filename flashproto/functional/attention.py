"""Attention: the public functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from .. import hooks, masks, reference
from ..checks.attention import check_attention, check_boundaries, check_used, check_varlen
from ..checks.heads import check_head_counts, check_packed
from ..masks import check_bands
from .attention_request import BOUNDARIES, Call, attention_request
from .autocast import autocast_low_precision
from .cached import cached

# Backend "hopper" takes tensors that start at multiples of 16 bytes.
by_alignment = functools.partial(cached, alignment=True)


@by_alignment
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_offset: int = 0,
    score_mod: hooks.Call | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    mask: masks.Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_aux: Sequence[str] = (),
    deterministic: bool = False,
    num_splits: int | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale * q k^T) v without ever writing the scores to memory.

    Query i is at position i + Sk - Sq, so that the last query is at the last key (bottom-right
    alignment, as in flash-attn; torch's is_causal is top-left, see scaled_dot_product_attention).  A
    query sees the keys that causal, window and mask all let it see.  What happens to a score, in this
    order: scale, softcap, ALiBi and biases, score_mod, mask; then the softmax with the sinks; then
    dropout.

    Args:
        q: [B, Hq, Sq, D], float16, bfloat16, float32 (float64 on the torch and reference backends),
            any strides.
        k: [B, Hkv, Sk, D]; Hkv divides Hq (GQA, MQA): query head h reads key head h // (Hq // Hkv).
        v: [B, Hkv, Sk, Dv]; Dv may differ from D.
        causal: a query sees the keys up to its position.
        window: (left, right): it sees the keys from position - left to position + right, both
            included; None is no bound.  masks.window also keeps the first keys in sight.
        softcap: a scaled score s becomes softcap * tanh(s / softcap); of float16 and bfloat16 on a GPU
            by the card's own tanh, which is off by 5e-4 of its value.  1e-30 to 1e30.
        sinks: [Hq], one more score for each row of a head, after scaling, without a value.
        alibi_slopes: [Hq]; -slope * |position - j| is added to the score of key j.
        bias: of any floating-point dtype and any shape that broadcasts to [B, Hq, Sq, Sk], any strides
            (an expanded one is not copied): added to the scores.  -inf hides a key from a query, on
            kernels so does less than -2.3e38.  Its gradient has its shape.
        relative_bias, relative_offset: [Hq or 1, R], and an integer: what is added to the score of key
            j is in column position - j + relative_offset of the head's row, or in the first or last
            column where there is none.  So column relative_offset is for the key at the query's
            position, those behind it for the keys before.
        score_mod: a function of the score and its place, made by flashproto.hooks.call, whose operands
            broadcast to [B, Hq, Sq, Sk].  Its i counts queries from 0, whatever their positions.  A
            result of -inf hides a key from a query.
        dropout_p: the share of probabilities that are dropped, from 0 to 1, rounded to a multiple of
            1/65536; the others are divided by 1 - dropout_p.  lse and return_aux are of all.
        dropout_seed: [1] int64 on q's device, which says together with places alone what is dropped,
            see dropout_mask.  None: drawn on the device by torch's generator, for each call anew.
        mask: a value of flashproto.masks.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        return_lse: also return the rows' logsumexp.
        return_aux: names of statistics to return too: "max_score", the largest scale * q k^T of a row,
            before softcap, among the keys that it sees (QK-clip), and "entropy", of the probabilities
            of the keys, the sink left out, in nats.
        deterministic: gradients are the same bits each time, as for all calls under
            torch.use_deterministic_algorithms(True).
        num_splits: into how many parts at most a row's keys are split in the forward, where rows are
            few for a GPU; the parts' results are merged.  1: never split.  None chooses.
        impl: the backend by name; None chooses.

    Returns:
        out [B, Hq, Sq, Dv] in q's dtype; with return_lse behind it lse [B, Hq, Sq], float32 (float64
        for float64 inputs), natural logarithm, of the sink too; then each of return_aux, as lse.
        Of out, lse and entropy there are gradients for q, k, v, sinks, alibi_slopes, biases and
        operands of score_mod, of max_score on backend "reference" alone.  A query that sees no key
        gives 0, lse -inf or its sink, max_score -inf and entropy 0.

    Raises:
        TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run this call;
        NotImplementedError: kernels are asked for a gradient of max_score (under torch.compile it is
        a constant, as after .detach()).

    Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2; Milakov and Gimelshein (2018).  Press et
    al., "Train Short, Test Long" (2021, ALiBi); Raffel et al., "Exploring the Limits of Transfer
    Learning" (2020, T5, whose buckets expand to a table by distance); Xiao et al., "Efficient Streaming
    Language Models with Attention Sinks" (2023).

    Example:
        >>> q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
        >>> out, lse = flashproto.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 4, 8, 16]), torch.Size([2, 4, 8]))
        >>> same = flashproto.attention(q, k, v, causal=True, window=(7, 0), mask=masks.causal())
        >>> torch.allclose(same, out, atol=1e-6)
        True
    """
    name = "attention"
    q, k, v = autocast_low_precision(q, k, v)
    check_attention(name, q, k, v)
    request = attention_request(
        name,
        q,
        k,
        v,
        causal=causal,
        window=window,
        mask=mask,
        scale=scale,
        return_lse=return_lse,
        return_aux=return_aux,
        deterministic=deterministic,
        num_splits=num_splits,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        bias=bias,
        relative_bias=relative_bias,
        relative_offset=relative_offset,
        score_mod=score_mod,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    return request.run(impl)


@by_alignment
def attention_qkv(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_offset: int = 0,
    score_mod: hooks.Call | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    mask: masks.Mask | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    impl: str | None = None,
) -> Tensor:
    """attention on the heads of a fused projection, read where they are; the gradient of qkv is written
    once, where splitting would have three gradients put together.

    Args: qkv [B, S, (n_heads + 2 n_kv_heads) D], the heads of q, then k, then v; others as attention.
    Returns: out [B, n_heads, S, D], in memory [B, S, n_heads, D].  Errors as attention.

    Example:
        >>> qkv = torch.randn(2, 8, (4 + 2 * 2) * 16)
        >>> flashproto.attention_qkv(qkv, 4, 2, causal=True, window=(3, 0)).shape
        torch.Size([2, 4, 8, 16])
    """
    name = "attention_qkv"
    (qkv,) = autocast_low_precision(qkv)
    heads = check_head_counts(name, n_heads, n_kv_heads)
    check_packed(name, qkv, *heads)
    q, k, v = reference.split_heads(qkv, *heads)
    check_attention(name, q, k, v)
    request = attention_request(
        name,
        q,
        k,
        v,
        inputs={"qkv": qkv},
        heads=heads,
        causal=causal,
        window=window,
        mask=mask,
        scale=scale,
        deterministic=deterministic,
        softcap=softcap,
        sinks=sinks,
        bias=bias,
        relative_bias=relative_bias,
        relative_offset=relative_offset,
        score_mod=score_mod,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    return request.run(impl)


@by_alignment
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    relative_offset: int = 0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    mask: masks.Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_aux: Sequence[str] = (),
    deterministic: bool = False,
    num_splits: int | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """attention of sequences of any lengths that lie side by side, each on its own.

    Lengths are read on the device alone: nothing waits for the GPU, a CUDA graph may be replayed with
    other lengths, and other lengths compile nothing.  The time follows from the tokens that there are.

    Args:
        q: [T, Hq, D], the tokens of all sequences; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: [n + 1] int32 on the same device, from 0 on, not decreasing:
            sequence s has the tokens cu_seqlens[s] to cu_seqlens[s + 1] - 1.  Lengths of 0 are fine.
        max_seqlen_q, max_seqlen_k: as in flash-attn; results do not depend on them.
        seqused_q, seqused_k: [n] int32 on the same device, or None: of sequence s only the first
            seqused[s] tokens count, from 0 to all that it has.  Those behind them are a gap: nothing
            depends on them, and they may hold NaN.
        causal, window, ... impl: as attention, in each sequence by itself.  A mask is a band: causal,
            window; sequences are documents already.  num_splits: keys are not split, whatever it is.

    Returns: out [T, Hq, Dv]; with return_lse behind it lse [Hq, T]; then each of return_aux, as lse.
        Tokens behind the last sequence give what a query without a key gives.  In gaps out is 0, lse
        and max_score -inf, entropy 0, and gradients are 0.

    Raises: as attention.

    Example:
        >>> q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
        >>> cu = torch.tensor([0, 5, 5, 12], dtype=torch.int32)  # sequences of 5, 0 and 7 tokens
        >>> out = flashproto.attention_varlen(q, k, v, cu, cu, causal=True)
        >>> first = (x[:5].transpose(0, 1)[None] for x in (q, k, v))
        >>> expected = flashproto.attention(*first, causal=True)[0].transpose(0, 1)
        >>> torch.allclose(out[:5], expected, atol=1e-5)
        True
    """
    name = "attention_varlen"
    q, k, v = autocast_low_precision(q, k, v)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    check_varlen(name, q, k, v, *lengths)
    if mask is not None:
        check_bands(name, mask)
    request = attention_request(
        name,
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        inputs={"q": q, "k": k, "v": v},
        lengths=(0, 0),
        causal=causal,
        window=window,
        mask=mask,
        scale=scale,
        return_lse=return_lse,
        return_aux=return_aux,
        deterministic=deterministic,
        num_splits=num_splits,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
        relative_offset=relative_offset,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    made = request.run(impl)
    if isinstance(made, Call) and cu_seqlens_q.is_cpu:
        names = [n for n in BOUNDARIES if n in request.variant.named]
        tokens = {"q": q.shape[0], "k": k.shape[0]}

        def check(*boundaries: Tensor) -> None:
            given = dict(zip(names, boundaries, strict=True))
            for side, n in tokens.items():
                starts, used = f"cu_seqlens_{side}", f"seqused_{side}"
                check_boundaries(name, starts, given[starts], n)
                if used in given:
                    check_used(name, used, given[used], given[starts])

        made = made.checked(names, check)
    return made
