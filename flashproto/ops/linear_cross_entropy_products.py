"""The matrix products of linear_cross_entropy.py, and the memory of logits.

Where cuBLAS has only slow products for V classes, all products take up to 7 more classes
(configs.product_classes).  These are zeros: rows of the weight, in a copy unless it is converted
already, and columns of the logits' gradient.  dweight and dbias have room for them after the last
class.

Legend: linear_cross_entropy.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import configs

# --- logits --------------------------------------------------------------------------------------


def padded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [V, ...] in `dtype`, with zeros for the classes that products of that dtype take beyond V."""
    V = x.shape[0]
    rows = configs.product_classes(V, dtype.itemsize)
    if rows == V:
        return x.to(dtype)
    wide = x.new_empty(rows, *x.shape[1:], dtype=dtype)
    wide[:V].copy_(x)
    wide[V:].zero_()
    return wide


def memory_of_logits(h: Tensor, rows: int, classes: int) -> Tensor:
    """Room for logits_of so many rows and classes, or fewer of either."""
    return h.new_empty(rows * configs.padded_classes(classes))


def logits_of(h: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
    """h weight^T + bias in `memory`, from its start on, each row from a 128-byte line on.

    In 16 bits logits with a bias are contiguous instead: torch then has cuBLAS add it to sums that are
    not rounded yet.  Elsewhere it copies the bias into the logits first, to which cuBLAS adds what it
    has rounded: that is two roundings, and as much memory written and read once more.
    """
    rows, classes = h.shape[0], weight.shape[0]
    contiguous = bias is not None and memory.element_size() == 2
    stride = classes if contiguous else configs.padded_classes(classes)
    logits = memory.as_strided((rows, classes), (stride, 1))
    if bias is None:
        return torch.mm(h, weight.t(), out=logits)
    return torch.addmm(bias, h, weight.t(), out=logits)


def zero_padding(dlogits: Tensor, unpadded: Tensor) -> None:
    """Zero the columns that dlogits has behind `unpadded`: they are no zeros where h is not finite."""
    if dlogits.shape[1] > unpadded.shape[1]:
        dlogits[:, unpadded.shape[1] :].zero_()


# --- gradients -----------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a b, or out += a b; out has the dtype of a and b or is float32, and so is the sum."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda:
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=int(add), out=out)


def hidden_gradient(dlogits: Tensor, W: Tensor, out: Tensor, classes: int) -> None:
    """out = dlogits W, in float32; from float32 the sum of products of `classes` classes each, since
    one sum over all may have many more roundings."""
    if dlogits.dtype != torch.float32:
        product(dlogits, W, out)
        return
    product(dlogits[:, :classes], W[:classes], out)
    for first in range(classes, W.shape[0], classes):
        part = slice(first, first + classes)
        out += torch.mm(dlogits[:, part], W[part])


def weight_gradient(dlogits: Tensor, h: Tensor, out: Tensor) -> None:
    """out = dlogits^T h, in whatever dtype."""
    if out.dtype in (h.dtype, torch.float32):
        product(dlogits.t(), h, out)
    else:
        out.copy_(torch.mm(dlogits.t(), h))


def column_sums(x: Tensor, out: Tensor, add: bool = False) -> None:
    """out = or += the sums of x's columns, in float32."""
    sums = x.sum(0, dtype=torch.float32)
    out.add_(sums) if add else out.copy_(sums)
