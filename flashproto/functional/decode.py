"""Decoding: attention in parts, and with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import reference
from ..checks import check_states


def merge_attention(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from the results of attention over some of the keys each.

        lse = log(sum_i exp(lse_i))         out = sum_i exp(lse_i - lse) out_i

    It joins splits of a sequence, a prefix that sequences share with what each has of its own, and
    the shards of ring attention.  With sinks, one of the parts alone may have them.

    Args:
        outs: tensors [..., Dv] of one shape, or all stacked [n, ..., Dv]; any floating dtypes.
        lses: as many [...], natural logarithm, as return_lse gives them (of attention_varlen lse.mT,
            to lie as out does).  A part in which a row sees no key has -inf there.

    Returns: (out, lse) of attention over all keys: out [..., Dv] in the widest dtype of outs, lse [...]
        in float32 (float64 if anything is float64), in which sums are taken.  A row that sees no key in
        any part gives 0 and -inf.  Differentiable in all outs and lses.
    Raises: TypeError, ValueError: an argument does not fit.
    Source: Milakov and Gimelshein (2018), section 3.1.

    Example:
        >>> q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
        >>> parts = [(k[:, :, :4], v[:, :, :4]), (k[:, :, 4:], v[:, :, 4:])]
        >>> outs, lses = zip(*[flashproto.attention(q, *kv, return_lse=True) for kv in parts])
        >>> out, lse = flashproto.merge_attention(outs, lses)
        >>> torch.allclose(out, flashproto.attention(q, k, v), atol=1e-6)
        True
    """
    check_states("merge_attention", outs, lses)
    return reference.merge_attention(list(outs), list(lses))
