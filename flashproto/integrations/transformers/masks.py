"""The masks that transformers asks for, without a tensor of queries times keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ... import masks
from ...checks.errors import refuse
from ...checks.options import check_integer
from ...mask_values import Band, joined_rule, rule_of_tensor
from .reading import FAR, Keys, Seen, Unreadable, read

OPERATOR = "flashproto in transformers"
CACHED = -(2**40)  # the offset of keys that Cache names, and no other one
CHANGED = ("doge",)  # models that make other masks of what is no tensor
DO_CACHE = "Pass another cache, such as transformers' DynamicCache."


class Carrier(masking_utils.BlockMask):
    """A mask of flashproto.masks on its way to the attention function: transformers hands on what is a
    Tensor or a BlockMask with a shape of 4 dimensions."""

    def __init__(self, mask: masks.Mask, shape: tuple[int, int, int, int]) -> None:
        self.mask = mask
        self.four = shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.four

    @property
    def ndim(self) -> int:
        return 4

    def to(self, device: Any = None, *args: Any, **options: Any) -> Carrier:
        """Itself with its tensors on a device; other arguments, such as non_blocking, do nothing."""
        if device is None:
            return self
        return type(self)(moved(self.mask, device), self.four)

    def unknown(self, *others: object) -> Any:
        do = "Use attn_implementation='eager' for this model."
        got = "cut or computed with by the model"
        refuse(OPERATOR, "the mask", got, "whole masks", do, NotImplementedError)

    __getitem__ = __invert__ = __neg__ = unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = unknown
    __and__ = __rand__ = __or__ = __ror__ = unknown

    def __repr__(self) -> str:
        return f"Carrier({self.mask!r})"

    __str__ = __repr__


def moved(mask: masks.Mask, device: Any) -> masks.Mask:
    """A mask with its tensors on a device; what a function of the user's reads stays where it is."""
    parts = [
        part._replace(**{name: getattr(part, name).to(device) for name in part.held})
        for part in mask.parts
    ]
    rule = mask.rule
    if rule is not None and rule.dense is not None:
        rule = rule_of_tensor(rule.dense.to(device))
    elif rule is not None and rule.masks:
        joined: Any = rule.seen
        rule = joined_rule(rule.words, joined.args[0], *(moved(x, device) for x in rule.masks))
    return masks.Mask(mask.bands, tuple(parts), rule)


class Given(Carrier):
    """The user's mask, in the place of those that the model would make."""


def attention_mask(mask: masks.Mask, length: int, batch_size: int = 1) -> Given:
    """A mask of flashproto.masks as transformers' argument attention_mask, which the kernels then take.

    The model makes no mask of its own then: `mask` says all, causal() too.  position_ids go with it.
    Not beside a cache of earlier tokens (pass use_cache=False); models alone that register() has set.

    Args: mask: the value; length: tokens of a row; batch_size: rows.
    Raises: TypeError, ValueError: no such mask or sizes.  NotImplementedError: when a model runs, by a
        layer whose tokens do not see all tokens before them (windows, chunks, recurrences).

    Example:
        >>> from flashproto.integrations.transformers import attention_mask
        >>> seen = attention_mask(masks.causal() & masks.documents(ids), ids.shape[-1])
        >>> model(tokens, attention_mask=seen, position_ids=positions, use_cache=False)
    """
    name, most = "attention_mask", masks.LONGEST
    for argument, n in (("length", length), ("batch_size", batch_size)):
        check_integer(name, argument, n, 1, most, "a positive integer", "Pass those of input_ids.")
    return Given(masks.check_mask(name, mask), (batch_size, 1, length, length))


def refuse_layers(module: Any, sliding_window: Any) -> None:
    """Refuse a mask of the user's in a model with layers that would see less than it says."""
    types = set(getattr(getattr(module, "config", None), "layer_types", None) or ())
    types -= {"full_attention"}
    if sliding_window is not None or types:
        got = f"beside layers of type {', '.join(sorted(types)) or 'sliding_attention'}"
        takes = "one for a model in which all layers see all tokens before"
        do = "Leave it out, and pass sequences in rows of their own."
        refuse(OPERATOR, "attention_mask", got, takes, do, NotImplementedError)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    config: Any = None,
    **options: Any,
) -> Carrier | Tensor | None:
    """transformers' mask interface.

    Returns: a Carrier, of a causal mask and of none at all too, since not all modules know which they
        have; for a static cache, whose length is a tensor, begin and end of masks.intervals, int32
        [B | 1, 1, 2, Sk]; for Cache what first_tokens gives; and of a function that is no interval
        sdpa_mask's tensor.
    """
    kind = getattr(config, "model_type", None)
    if kind in CHANGED:
        takes, do = "models that hand masks on", "Use attn_implementation='sdpa' for this model."
        refuse(OPERATOR, "config.model_type", kind, takes, do, NotImplementedError)
    if kv_offset == CACHED:
        return first_tokens(q_length, q_offset, mask_function, attention_mask)
    traced = torch.compiler.is_compiling()
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device)
        if not traced and bool(padding.all()):  # waits for the device, as sdpa_mask does
            padding = None
    try:
        seen = read_mask_function(mask_function, traced)
        band, rest = seen.band(), not seen.is_band()
        if band is not None and not traced:  # of sizes that are symbols it would be a guard
            band = within(band, kv_length)
        causal = band == (None, 0) and not rest
        everything = band == (None, None)
        aligned = everything or is_zero(q_offset - kv_offset - (kv_length - q_length))
        shape = (batch_size, 1, q_length, kv_length)
        if causal and allow_is_causal_skip and is_prompt(q_length, q_offset, padding, traced):
            return Carrier(masks.causal(top_left=True), shape)
        mask = masks.Mask()
        if band is None or not aligned:
            band, rest = None, True
        elif not everything:
            mask = masks.Mask((Band(*band, 0, False),))
        if not rest and padding is None:
            return Carrier(mask, shape)
        keys = Keys(kv_offset, kv_length, device)
        begin, end = seen.span(keys, bands=band is None)
        if rest:
            begin, end = begin - q_offset, end - q_offset
    except Unreadable:
        return masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
    if padding is not None:
        end = torch.where(padding, end, begin)
    begin, end = (x.clamp(-FAR, FAR).int().contiguous() for x in torch.broadcast_tensors(begin, end))
    if isinstance(q_offset, Tensor):  # tensors alone, which are a compiled step's inputs
        return torch.stack((begin, end), 1)[:, None].contiguous()
    return Carrier(mask & masks.intervals(begin, end), shape)


def read_mask_function(function: Callable[..., Any], traced: bool) -> Seen:
    """read, of whatever function: one that cannot be called with its indices is Unreadable too."""
    if traced:  # which cannot go on behind another error
        return read(function)
    try:
        return read(function)
    except Exception as error:
        raise Unreadable(str(error)) from error


def is_zero(x: Any) -> bool:
    return False if isinstance(x, Tensor) else bool(x == 0)


def within(band: tuple[int | None, int | None], keys: int) -> tuple[int | None, int | None]:
    """A band without the bounds that no key is behind."""
    left, right = (None if x is not None and x >= keys else x for x in band)
    return left, right


def is_prompt(q_length: int, q_offset: Any, padding: Tensor | None, traced: bool) -> bool:
    """Whether queries are the first tokens in a static cache: causal to the first q_length keys."""
    if q_length == 1 or not is_zero(q_offset):
        return False
    return padding is None or (not traced and bool(padding[:, :q_length].all()))


# --- beside Cache -----------------------------------------------------------------------------------


class Padding(Carrier):
    """For Cache.  starts: the first token of each sequence that is no padding, int32 [B], None for 0;
    left: how many tokens back the mask lets a query see, None for all."""

    def __init__(self, starts: Tensor | None, left: int | None) -> None:
        super().__init__(masks.Mask(), (0, 0, 0, 0))
        self.starts, self.left = starts, left

    def to(self, device: Any = None, *args: Any, **options: Any) -> Padding:
        if device is None or self.starts is None:
            return self
        return Padding(self.starts.to(device), self.left)


def first_tokens(
    q_length: int, q_offset: Any, mask_function: Callable[..., Any], attention_mask: Tensor | None
) -> Padding | None:
    """None of one token behind others, for which Cache knows: it is the same step, compiled or not."""
    traced = torch.compiler.is_compiling()
    is_step = q_length == 1 and (isinstance(q_offset, Tensor) or q_offset > 0)
    if is_step and (traced or attention_mask is None):
        return None
    try:
        seen = read_mask_function(mask_function, traced)
        band = seen.band() if seen.is_band() else None
    except Unreadable:
        band = None
    if band is None or band[1] != 0:
        got, takes = "a mask of its own", "causal masks and windows beside Cache"
        refuse(OPERATOR, "the model's mask", got, takes, DO_CACHE, NotImplementedError)
    if attention_mask is None:
        return Padding(None, band[0])
    known = not isinstance(q_offset, Tensor) and not traced
    if known and attention_mask.shape[1] < q_offset + q_length:
        got, takes = f"of {attention_mask.shape[1]} tokens", f"one of all {q_offset + q_length}"
        refuse(OPERATOR, "attention_mask", got, takes, "Put the mask of what is cached before it.")
    real = attention_mask.bool()
    holes = (real[:, 1:] < real[:, :-1]).any()
    if traced:
        torch._assert_async(~holes, "flashproto: holes, or padding behind the tokens, beside Cache")
    elif bool(holes):
        got = "with holes, or padding behind the tokens"
        takes, do = "padding before the tokens, beside Cache", "Set tokenizer.padding_side = 'left'."
        refuse(OPERATOR, "attention_mask", got, takes, do, NotImplementedError)
    if is_step:
        return None
    if not traced and bool(real[:, 0].all()):
        return Padding(None, band[0])
    return Padding((~real).sum(-1).int(), band[0])
