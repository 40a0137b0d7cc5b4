"""QK norm, alone or with the rotary embedding behind it: the public functions."""

from __future__ import annotations

from torch import Tensor

from .. import backends, reference
from ..backends import refuses_values
from ..checks.calls import told
from ..checks.errors import refuse
from ..checks.heads import (
    check_head_weights,
    check_heads_of,
    check_packed,
    check_table_rows,
    check_tables,
)
from ..checks.options import check_eps, check_flag
from ..checks.rows import check_casting
from .rope import choose_with_tables, table_rows

if backends.HAS_TRITON:
    from ..ops import qk_norm as qk_norm_op


@told
def qk_norm(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    interleaved: bool = False,
    eps: float | None = None,
    casting: str = "torch",
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the D dimensions of every head of q and k, then rope, in one pass each way.

    Args:
        q, k, cos, sin, positions, offset, interleaved: as rope; without cos and sin no rotation.
        q_weight, k_weight: [D] of any floating dtype, shared by the heads, or None.
        eps: added to the mean square; None is torch.finfo(q.dtype).eps, as in torch.
        casting: "torch" rounds the result alone; "llama" also x / sqrt(mean(x^2) + eps), before the
            weight; "gemma" multiplies by 1 + weight.
        impl: the backend by name; None chooses.

    Returns: (q, k), or q alone where k is None; of their shapes and dtypes, computed in float32
    (float64 for float64).  The norm's result is not rounded before it is rotated.
    Raises: TypeError, ValueError: an argument does not fit; BackendError: `impl` cannot run.
    Source: Henry et al., "Query-Key Normalization for Transformers" (2020), with RMSNorm as in
    Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters" (2023); rope.

    Example:
        >>> q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
        >>> q1, k1 = flashproto.qk_norm(q, k, torch.ones(16), torch.ones(16), *nn.rope_tables(8, 16))
        >>> normed = flashproto.rms_norm(q, 16)
        >>> torch.allclose(q1, flashproto.rope(normed, None, *nn.rope_tables(8, 16)), atol=1e-5)
        True
    """
    name = "qk_norm"
    check_heads_of(name, q, k)
    check_head_weights(name, q.shape[3], q.device, q_weight, k_weight)
    size = q.shape[0], q.shape[2], q.shape[3]
    offset = _check(name, *size, q, cos, sin, positions, offset, casting)
    interleaved = check_flag(name, "interleaved", interleaved)
    eps = check_eps(name, eps, q.dtype)
    tensors = [t for t in (q, k, q_weight, k_weight) if t is not None]
    backend = choose_with_tables(name, impl, tensors, cos, sin)
    if cos is not None and refuses_values(impl, backend):
        check_table_rows(name, cos.shape[0], q.shape[2], positions, offset)
    if backend == "triton":
        positions, rows = table_rows(positions, offset)
        inputs = q, k, q_weight, k_weight, cos, sin, positions
        settings = qk_norm_op.Settings(*rows, interleaved, eps, casting)
        return qk_norm_op.qk_norm(inputs, settings, (0,) if k is None else (0, 1))
    how = (cos, sin, positions, offset, eps)
    q = reference.qk_norm(q, q_weight, *how, interleaved=interleaved, casting=casting)
    if k is None:
        return q
    return q, reference.qk_norm(k, k_weight, *how, interleaved=interleaved, casting=casting)


@told
def qk_norm_qkv(
    qkv: Tensor,
    n_heads: int,
    n_kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    interleaved: bool = False,
    eps: float | None = None,
    casting: str = "torch",
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a fused projection, q and k normalized and rotated, in one pass; the gradient of
    qkv is written once.

    Args:
        qkv: [B, S, (n_heads + 2 n_kv_heads) D], the heads of q, then k, then v.
        n_heads, n_kv_heads: the numbers of query heads and of key heads.
        q_weight, k_weight, eps, casting, impl: as in qk_norm.
        cos, sin, positions, offset, interleaved: as in rope; without cos and sin no rotation.

    Returns: q [B, n_heads, S, D], k and v [B, n_kv_heads, S, D].
    Raises: what qk_norm raises.

    Example:
        >>> qkv = torch.randn(2, 8, (4 + 2 * 2) * 16)
        >>> q, k, v = flashproto.qk_norm_qkv(qkv, 4, 2, torch.ones(16), torch.ones(16))
        >>> q.shape, k.shape, v.shape
        (torch.Size([2, 4, 8, 16]), torch.Size([2, 2, 8, 16]), torch.Size([2, 2, 8, 16]))
    """
    name = "qk_norm_qkv"
    n_heads, n_kv_heads, D = check_packed(name, qkv, n_heads, n_kv_heads)
    check_head_weights(name, D, qkv.device, q_weight, k_weight)
    size = qkv.shape[0], qkv.shape[1], D
    offset = _check(name, *size, qkv, cos, sin, positions, offset, casting)
    interleaved = check_flag(name, "interleaved", interleaved)
    eps = check_eps(name, eps, qkv.dtype)
    tensors = [t for t in (qkv, q_weight, k_weight) if t is not None]
    backend = choose_with_tables(name, impl, tensors, cos, sin)
    if cos is not None and refuses_values(impl, backend):
        check_table_rows(name, cos.shape[0], qkv.shape[1], positions, offset)
    if backend == "triton":
        positions, rows = table_rows(positions, offset)
        inputs = qkv, q_weight, k_weight, cos, sin, positions
        settings = qk_norm_op.PackedSettings(n_heads, n_kv_heads, *rows, interleaved, eps, casting)
        return qk_norm_op.qk_norm_packed(inputs, settings, (0, 1, 2))
    q, k, v = reference.split_heads(qkv, n_heads, n_kv_heads)
    how = (cos, sin, positions, offset, eps)
    q = reference.qk_norm(q, q_weight, *how, interleaved=interleaved, casting=casting)
    k = reference.qk_norm(k, k_weight, *how, interleaved=interleaved, casting=casting)
    return q, k, v


def _check(
    name: str,
    B: int,
    S: int,
    D: int,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    offset: int | Tensor,
    casting: str,
) -> int | Tensor:
    """offset, once all fit."""
    check_casting(name, casting)
    if cos is not None and sin is not None:
        return check_tables(name, B, S, D, x.device, cos, sin, positions, offset)
    if cos is not None or sin is not None:
        missing = "sin" if sin is None else "cos"
        refuse(name, missing, None, "a table beside the other", "Pass both, or neither.")
    if positions is not None:
        refuse(name, "positions", "given", "None without cos and sin", "Pass cos and sin.")
    return offset
