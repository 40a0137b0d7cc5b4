"""The kernels of attention to a cache, in the tiles that flashproto.configs chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from compile_case import Case, given_of

from flashproto import configs
from flashproto.kernels.attention_decode import attention_decode_kernel, merge_kernel
from flashproto.kernels.kv_cache import append_kernel
from flashproto.variant import Kind

INT32 = ("lengths_ptr", "page_table_ptr", "cache_index_ptr", "starts_ptr", "cu_seqlens_ptr")
PIECES = ("pieces_ptr", "piece_lse_ptr")
CAUSAL = Kind(CAUSAL=True)


@dataclass(frozen=True)
class Call:
    """group: query heads of a key head; tokens: queries.  pages: their size."""

    D: int
    group: int
    tokens: int = 1
    element: str = "bf16"
    kind: Kind = CAUSAL
    pages: int = 0
    scales: int = 0
    rope: bool = False
    split: bool = True
    optional: tuple[str, ...] = ("lengths_ptr",)

    @property
    def name(self) -> str:
        words = [f"{self.D}-{self.group}x{self.tokens}-{self.kind.name}-{self.element}"]
        words += [f"pages{self.pages}"] * bool(self.pages) + [f"e4m3-{self.scales}"] * bool(self.scales)
        words += ["rope"] * self.rope + ["whole"] * (not self.split)
        return "-".join(words)


VARIANT = Kind(CAUSAL=True, WINDOW=True, SOFTCAP=1, ALIBI=True, SINKS=True)
BATCH = ("lengths_ptr", "cache_index_ptr", "starts_ptr", "cu_seqlens_ptr")
CALLS = (
    Call(128, 4),
    Call(128, 4, pages=16),
    Call(128, 4, pages=48, rope=True, optional=BATCH),
    Call(128, 4, scales=1),
    Call(128, 4, scales=2, pages=16),
    Call(64, 8, 64, scales=1),
    Call(128, 8, 4),
    Call(128, 8, 8, pages=64),
    Call(128, 8, 16),
    Call(128, 8, 512, kind=Kind(), optional=()),
    Call(128, 4, 512, split=False),
    Call(64, 8),
    Call(96, 1, element="fp16"),
    Call(256, 8),
    Call(512, 8),
    Call(512, 4, 4, scales=1),
    Call(512, 4, 4, element="fp32"),
    Call(128, 4, 4, kind=VARIANT),
    Call(128, 4, element="fp32"),
)


def case(
    name: str,
    kernel: Any,
    values: dict[Any, Any],
    types: dict[str, Any],
    element: str,
    c: Call,
    **options,
) -> Case:
    signature: dict[str, Any] = {}
    aligned = []
    values = dict(values)
    optional = {
        *INT32,
        *PIECES,
        "cos_ptr",
        "sin_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "prefix_ptr",
        "prefix_lse_ptr",
    }
    given = {*c.optional, *(("cos_ptr", "sin_ptr") * c.rope), *(("page_table_ptr",) * bool(c.pages))}
    given |= {"k_scale_ptr", "v_scale_ptr"} if c.scales else set()
    given |= set(PIECES) if c.split else set()
    for argument in kernel.arg_names:
        if argument in optional and argument not in given:
            values[argument] = None
        elif argument == "given":
            types_given, absent = given_of(kernel, c.kind)
            signature[argument] = types_given._replace(sinks="*bf16") if c.kind.SINKS else types_given
            values |= absent
        elif argument.endswith("_ptr"):
            kind = "i32" if argument in INT32 else types.get(argument, element)
            signature[argument] = f"*{kind}"
            aligned.append(argument)
        elif argument in values:
            continue
        elif argument in ("stride_qd", "stride_kd", "stride_vd", "stride_od", "stride_cd", "stride_wd",
                          "stride_pd"):  # fmt: skip
            values[argument] = 1
        elif argument.startswith("stride_"):
            signature[argument] = "i32"
            aligned.append(argument)
        else:
            signature[argument] = "fp32" if argument == "scale" else "i32"
    names = {n: v for n, v in values.items() if n in kernel.arg_names or isinstance(n, tuple)}
    return Case(name, kernel, signature, names, tuple(aligned), **options)


def decode_cases(arch: int) -> Iterator[Case]:
    capability = divmod(arch, 10)
    for c in CALLS:
        if c.scales and arch < 89:
            continue
        size = {"bf16": 2, "fp16": 2, "fp32": 4}[c.element]
        cache, cache_size = ("fp8e4nv", 1) if c.scales else (c.element, size)
        rows, paged = c.group * c.tokens, bool(c.pages)
        config = configs.attention_decode(capability, size, cache_size, c.D, c.D, rows, paged)
        merged = configs.decode_merge(min(rows, config.block_m), 8, 264, c.D, 132)
        width = configs.padded_head_dim(c.D)
        max_stack = 0 if width <= 128 else 65536
        if size == 4:
            max_stack = 16  # Triton 3.6 spills a few registers there
        if arch == 90 and paged and config.block_m == 64:
            max_stack = 64  # and here, as 3.9 does: outside of the loop
        shared = {
            "GROUP": c.group, "D": c.D, "DV": c.D, "BLOCK_D": width, "BLOCK_DV": width,
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_B": 16, "KIND": c.kind,
            "BY_HEAD": False, "HALF": c.D // 2 if c.rope else 0, "INTERLEAVED": False,
            "PAGE_SIZE": c.pages, "ROLLS": c.kind.WINDOW, "SCALES": c.scales, "SPLIT": c.split,
            "EXACT": size == 4, "TF32": False, "WIDE": False, "BLOCK_H": 8,
            "PREFIX": False, "ROWS": merged.rows, "PIECES": merged.pieces,
            "PDL": arch >= 90, "PAIRS": bool(c.scales),
        }  # fmt: skip
        types = dict.fromkeys(("k_ptr", "v_ptr"), cache)
        types |= dict.fromkeys(
            ("lse_ptr", "k_scale_ptr", "v_scale_ptr", "cos_ptr", "sin_ptr", *PIECES), "fp32"
        )
        yield case(
            f"decode-{c.name}", attention_decode_kernel, shared, types, c.element, c,
            num_warps=config.num_warps, num_stages=config.num_stages,
            max_stack=max_stack,
        )  # fmt: skip
        if c.split and c.tokens == 1:
            pieces = dict.fromkeys(("lse_ptr", *PIECES), "fp32")
            yield case(
                f"merge-{c.name}", merge_kernel, shared, pieces, c.element, c,
                num_warps=merged.num_warps, max_stack=max_stack,
            )  # fmt: skip
        if c.pages:
            types = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache)
            types |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "cos_ptr", "sin_ptr"), "fp32")
            yield case(f"append-{c.name}", append_kernel, shared, types, c.element, c, num_warps=4)
