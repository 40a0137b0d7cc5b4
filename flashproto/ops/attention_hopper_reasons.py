"""What backend "hopper" asks of an attention call's tensors.  Beside the launch, but without Gluon,
which not every Triton has."""

from __future__ import annotations

import functools

import torch


def hopper_attention_reasons(q, k, v) -> list[str]:
    """What TMA and the tiles of kernels/hopper do not take."""
    compiling = torch.compiler.is_compiling()
    memory_reasons = _hopper_memory_reasons.__wrapped__ if compiling else _hopper_memory_reasons
    reasons = memory_reasons(
        q.dtype, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    )  # fmt: skip
    # torch.compile neither traces nor guards offsets; the launch copies what does not start right.
    if not compiling and (q.storage_offset() | k.storage_offset() | v.storage_offset()) % 8:
        late = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.storage_offset() % 8]
        names = " and ".join(late)
        reasons = [*reasons, f"{names} does not start at a multiple of 16 bytes, as TMA wants"]
    return reasons


@functools.lru_cache(1024)
def _hopper_memory_reasons(dtype, q_shape, k_shape, v_shape, *strides) -> list[str]:
    """The part that follows from dtype, shapes and strides."""
    reasons = []
    D, Dv = q_shape[3], v_shape[3]
    if dtype not in (torch.bfloat16, torch.float16):
        return [f"dtype is {str(dtype)[6:]}; the kernels take bfloat16 and float16"]
    if Dv != D:
        reasons.append(f"q and k have head_dim {D} and v has {Dv}; the kernels take one for all")
    if D > 256 or D % 8:
        reasons.append(f"head_dim is {D}; the kernels take multiples of 8 up to 256")
    if 0 in q_shape or 0 in k_shape:
        reasons.append("q or k is empty")
    if k_shape[1] * D >= 2**25:
        reasons.append(f"{k_shape[1]} key heads of {D} are too many: a token's gradient passes 2^25")
    for name, shape, stride in zip("qkv", (q_shape, k_shape, v_shape), strides, strict=True):
        if stride[3] != 1:
            reasons.append(f"{name}'s last dimension has stride {stride[3]}; TMA takes 1")
        for dim in range(3):
            if shape[dim] > 1 and (stride[dim] <= 0 or stride[dim] % 8 or stride[dim] >= 2**39):
                reasons.append(
                    f"{name}'s stride {stride[dim]} of dimension {dim} is no positive multiple of 8 "
                    "elements (16 bytes) below 2^39; TMA takes no other"
                )
    return reasons
