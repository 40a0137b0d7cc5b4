"""PyTorch's own functions of attention on this library's kernels, without a change of the model:
scaled_dot_product_attention, and varlen_attn and nested tensors, where they take torch's flash backend.

    from flashproto.integrations import torch as torch_attention
    torch_attention.activate()

It is an implementation in torch's registry of them (torch.nn.attention), whose operators lie below
autograd: each is a plain forward or backward.  A call that this library does not take goes on to the
kernel that torch had; forward and backward decide by the same function, `takes`.  What torch sends to
its other backends, such as masks, is taken before it chooses: scaled_dot_product_attention itself is an
operator, made of others.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import attention as torch_attention

from .. import backends
from ..checks.errors import refuse
from ..checks.reading import transforms_active
from ..functional import attention, attention_varlen, scaled_dot_product_attention
from ..functional.attention_gradients import attention_gradients
from ..functional.autocast import without_autocast
from ..variant import LARGEST_HEAD_DIM

NAME = "flashproto"
DEVICE = "cuda"
FLASH_DTYPES = torch.float16, torch.bfloat16  # that torch's flash backend takes
PLAIN = Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor  # others know what becomes of them

# Of torch, what an activation needs.
NEEDED = (
    "torch.nn.attention.register_flash_attention_impl",
    "torch.nn.attention.activate_flash_attention_impl",
    "torch.nn.attention.restore_flash_attention_impl",
    "torch.nn.attention.current_flash_attention_impl",
    "torch.library.get_kernel",
    "torch._fused_sdp_choice",
    "torch._C._get_sdp_priority_order",
    "torch._C._set_sdp_priority_order",
    "torch.compiler.config.cache_key_tag",
    "torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache",
    "torch.ops.aten._flash_attention_forward",
    "torch.ops.aten._flash_attention_backward",
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward",
)


# --- on and off -----------------------------------------------------------------------------------


class Activation:
    """What activate() returns: as a context manager it calls restore() at the end, unless this library
    was active before."""

    def __init__(self, undoes: bool) -> None:
        self.undoes = undoes

    def __enter__(self) -> Activation:
        return self

    def __exit__(self, *_: object) -> None:
        if self.undoes:
            restore()


_before: str | None = None  # the implementation that was active before, if it was not torch's own


def activate() -> Activation:
    """Make torch's flash backend this library's, and the first that torch tries.

    torch.nn.functional.scaled_dot_product_attention, torch.nn.attention.varlen.varlen_attn, modules
    made of them and nested tensors then run here, forward and backward, eager and compiled.  The first
    one does with masks, dropout and all that torch takes; float64, tensors of subclasses, transforms of
    torch.func and what sdpa_kernel keeps from flash go on to torch.  So do, of the others, calls with
    dropout, Dv other than D, block_table, alibi_slopes or a negative scale.  A function that
    was compiled and called before keeps the backend that it was compiled for.

    Choose the current GPU first (torch.cuda.set_device): torch is asked there for its order of
    backends.

    Returns: an Activation; `with activate():` undoes it at the end, restore() does at any time.

    Raises: NotImplementedError: this torch has no such registry, or not all that it takes;
        flashproto.backends.BackendError: there is no GPU that the kernels run on.
    Source: torch.nn.attention.register_flash_attention_impl.

    Example:
        >>> from flashproto.integrations import torch as torch_attention
        >>> with torch_attention.activate():  # doctest: +SKIP
        ...     loss = model(tokens).sum()
        ...     loss.backward()
    """
    global _before
    missing = [name for name in NEEDED if not is_there(name)]
    if missing:
        got = f"of version {torch.__version__}, without {', '.join(missing)}"
        do = "Update it, or call flashproto.scaled_dot_product_attention."
        refuse("activate", "torch", got, "torch 2.11 or later", do, NotImplementedError)
    against = backends.device_reasons(backends.get_default() or "triton", torch.device(DEVICE))
    if against:
        raise backends.BackendError(
            f"activate: no kernels for {DEVICE}: {'; '.join(against)}. Call "
            "flashproto.scaled_dot_product_attention, which runs on a CPU too."
        )
    before = torch_attention.current_flash_attention_impl()
    if before != NAME:
        torch_attention.register_flash_attention_impl(NAME, register_fn=Registration)
        torch_attention.activate_flash_attention_impl(NAME)
        _before = before
    return Activation(before != NAME)


def restore() -> None:
    """Undo activate(): torch's kernels, or the implementation that was active before, and the order of
    backends are as they were.  Nothing where this library is not active.

    Example:
        >>> from flashproto.integrations import torch as torch_attention
        >>> torch_attention.restore()
    """
    current = getattr(torch_attention, "current_flash_attention_impl", None)
    if current is not None and current() == NAME:
        torch_attention.restore_flash_attention_impl()
        if _before is not None:
            torch_attention.activate_flash_attention_impl(_before)


def is_there(name: str) -> bool:
    try:
        operator.attrgetter(name.removeprefix("torch."))(torch)
    except AttributeError:
        return False
    return True


class Registration:
    """The operators at the dispatcher, and flash first in the order of backends, until `remove`, which
    torch's registry calls.

    torch keeps compiled functions, on disk too, and finds them again without a look at its backends of
    attention: one compiled before, for cuDNN say, would come back.  Meanwhile they have a tag of their
    own.
    """

    def __init__(self) -> None:
        key = DEVICE.upper()
        # Autograd's first: beside a kernel for the device its own one is no longer torch's composition.
        self.libraries = {x: torch.library.Library("aten", "IMPL", x) for x in (f"Autograd{key}", key)}
        for at, library in self.libraries.items():
            override(library, "scaled_dot_product_attention", sdpa, at)
        for name, function in OPERATORS.items():
            if is_there(f"torch.ops.aten.{name}"):
                override(self.libraries[key], name, function, key)
        forget_dispatch()
        self.order_before = order_of_backends()
        flash = torch_attention.SDPBackend.FLASH_ATTENTION.value
        self.order = [flash, *(x for x in self.order_before if x != flash)]
        torch._C._set_sdp_priority_order(self.order)
        self.tag_before = torch.compiler.config.cache_key_tag
        self.tag = f"{self.tag_before}+{NAME}"
        torch.compiler.config.cache_key_tag = self.tag

    def remove(self) -> None:
        self.libraries.clear()
        forget_dispatch()
        if torch.compiler.config.cache_key_tag == self.tag:
            torch.compiler.config.cache_key_tag = self.tag_before
        if torch._C._get_sdp_priority_order() == self.order:  # else someone else chose since
            torch._C._set_sdp_priority_order(self.order_before)


def order_of_backends() -> list[int]:
    """The order in which torch tries them, which it settles for a GPU in the first call that asks."""
    x = torch.empty(1, 1, 0, 8, dtype=torch.float16, device=DEVICE)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():  # the math backend may be off
        warnings.simplefilter("ignore")
        torch._fused_sdp_choice(x, x, x)
    return torch._C._get_sdp_priority_order()


def override(library: torch.library.Library, name: str, function: Callable[..., Any], key: str) -> None:
    """function(...) at the dispatcher; where it gives None, the kernel that is there now."""
    own = torch.library.get_kernel(f"aten::{name}", key)

    def run(keys: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        made = function(*args, **options)
        return own.call_boxed(keys, *args, **options) if made is None else made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the override is meant
        library.impl(name, run, key, with_keyset=True, allow_override=True)


def forget_dispatch() -> None:
    """What the operators that torch.compile traced before keep, in Python: which key's kernel they ran,
    the composition for one."""
    for name in ("scaled_dot_product_attention", *OPERATORS):
        if is_there(f"torch.ops.aten.{name}"):
            getattr(torch.ops.aten, name).default._dispatch_cache.clear()


# --- which calls ----------------------------------------------------------------------------------


def takes(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None, starts: Sequence[Any]
) -> bool:
    """Whether this library runs a call of q [B, Hq, Sq, D], k and v; or with starts, the cu_seqlens of
    queries and keys, of q [T, Hq, D], k and v.  The forward and the backward ask here."""
    D, own = q.shape[-1], (k, v, *starts)
    return (
        q.ndim == k.ndim == (3 if starts else 4)
        and k.shape == v.shape
        and k.shape[-1] == D
        and 0 < D <= LARGEST_HEAD_DIM
        and (bool(starts) or q.shape[0] == k.shape[0])
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and dropout_p == 0
        and (scale is None or 0 <= scale < math.inf)
        and all(isinstance(x, Tensor) and x.device == q.device for x in own)
        and all(x.dtype == torch.int32 and x.shape == starts[0].shape for x in starts)
        and all(x.ndim == 1 and x.shape[0] > 0 for x in starts)
        and runs_on(q.device, backends.get_default())
    )


@functools.cache
def runs_on(device: torch.device, default: str | None) -> bool:
    """Whether the kernels, or the backend that is the default by name, run there; torch's own kernels
    are nearer than backend "torch"."""
    return default != "torch" and not backends.device_reasons(default or "triton", device)


def options_of(
    is_causal: bool, left: int | None, right: int | None, scale: float | None
) -> dict[str, Any]:
    """Causal is aligned bottom-right in these operators; a bound below 0 is none."""
    bounds = tuple(None if n is None or n < 0 else n for n in (left, right))
    window = None if bounds == (None, None) else bounds
    return {"causal": is_causal, "window": window, "scale": scale}


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[Tensor], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out, lse), lse +inf where a query sees no key, as torch's kernels have it."""
    function: Any = attention_varlen if starts else attention
    with torch.no_grad(), without_autocast(q):
        out, lse = function(q, k, v, *starts, return_lse=True, **options)
        if starts or q.shape[2] > k.shape[2]:
            lse.nan_to_num_(math.nan, math.inf, math.inf)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Sequence[Tensor],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad(), without_autocast(q):
        return attention_gradients(dout, q, k, v, out, lse, *starts, **options)


def laid(x: Tensor, like: Tensor) -> Tensor:
    """x, lying in memory as empty_like(like): compiled code counts on that."""
    strides = torch.empty_like(like, device="meta").stride()
    sizes = zip(x.shape, x.stride(), strides, strict=True)
    if all(n == 1 or own == wanted for n, own, wanted in sizes):
        return x
    return torch.empty_like(like).copy_(x)


def random_state(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the operators return of dropout, of which there is none."""
    state, offset = (torch.empty(n, dtype=torch.uint64, device=query.device) for n in ((2,), ()))
    return state, offset, query.new_empty(0)


# --- scaled_dot_product_attention, before torch chooses a backend ---------------------------------

inside = threading.local()  # while it runs, where this library may send it back to torch


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """What this library takes and torch's flash backend does not; else None."""
    given = query, key, value, *([] if attn_mask is None else [attn_mask])
    if (
        getattr(inside, "runs", False)
        or transforms_active()
        or not all(type(x) in PLAIN for x in given)
    ):
        return None
    if not torch.backends.cuda.flash_sdp_enabled() or not runs_on(query.device, backends.get_default()):
        return None
    if attn_mask is None and by_flash(query, key, value, dropout_p, is_causal, scale):
        return None
    inside.runs = True
    try:
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa
        return scaled_dot_product_attention(query, key, value, *options)
    except (TypeError, ValueError, NotImplementedError, backends.BackendError):
        return None  # torch takes it, or says in its own words what is wrong
    finally:
        inside.runs = False


def by_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> bool:
    """Whether it comes here by torch's flash backend."""
    return (
        q.dtype in FLASH_DTYPES
        and takes(q, k, v, dropout_p, scale, ())
        and (not is_causal or q.shape[2] == k.shape[2])
        and all(x.shape[2] > 0 and x.stride(3) == 1 for x in (q, k, v))
    )


# --- the operators, by torch's names of their arguments -------------------------------------------


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...] | None:
    """query [B, Hq, Sq, D]."""
    if return_debug_mask or not takes(query, key, value, dropout_p, scale, ()):
        return None
    out, lse = forward(query, key, value, (), options_of(is_causal, None, None, scale))
    lengths = query.shape[2], key.shape[2]
    return laid(out, query), lse, None, None, *lengths, *random_state(query)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...] | None:
    if not takes(query, key, value, dropout_p, scale, ()):
        return None
    options = options_of(is_causal, None, None, scale)
    made = backward(grad_out, query, key, value, out, logsumexp, (), options)
    return tuple(map(laid, made, (query, key, value)))


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...] | None:
    """query [B, Sq, Hq, D], or [T, Hq, D] with cum_seq_q and cum_seq_k."""
    if return_debug_mask or alibi_slopes is not None or block_table is not None:
        return None
    q, k, v, starts = arranged(cum_seq_q, cum_seq_k, query, key, value)
    if not takes(q, k, v, dropout_p, scale, starts):
        return None
    options = options_of(is_causal, window_size_left, window_size_right, scale)
    options["num_splits"] = num_splits or None
    if seqused_k is not None:  # of sequences, and int32 for each
        if not starts or seqused_k.dtype != torch.int32 or seqused_k.shape != starts[0][1:].shape:
            return None
        options["seqused_k"] = seqused_k
    out, lse = forward(q, k, v, starts, options)
    out = out if starts else out.transpose(1, 2)
    return laid(out, query), lse, *random_state(query)


def flash_forward_into(out: Tensor, *args: Any, **options: Any) -> Tensor | None:
    """flash_forward with its result in `out`: lse."""
    made = flash_forward(*args, **options)
    if made is None:
        return None
    out.copy_(made[0])
    return made[1]


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...] | None:
    q, k, v, dout, own, starts = arranged(cum_seq_q, cum_seq_k, query, key, value, grad_out, out)
    if not takes(q, k, v, dropout_p, scale, starts):
        return None
    options = options_of(is_causal, window_size_left, window_size_right, scale)
    made = backward(dout, q, k, v, own, logsumexp, starts, options)
    there = made if starts else (x.transpose(1, 2) for x in made)
    return tuple(map(laid, there, (query, key, value)))


def arranged(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, *tensors: Tensor) -> tuple[Any, ...]:
    """The tensors as attention takes them, or with cum_seq as attention_varlen does; then these."""
    if cum_seq_q is None and cum_seq_k is None:
        return *(x.transpose(1, 2) if x.ndim == 4 else x for x in tensors), ()
    return *tensors, (cum_seq_q, cum_seq_k)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    # torch 2.11 has no such operator, nor the function that calls it, varlen_attn_out.
    "_flash_attention_forward_no_dropout_inplace": flash_forward_into,
    "_flash_attention_backward": flash_backward,
}
