"""A request for attention: what every public function of attention makes of its arguments, once, and
what reasons, the choice of a backend and the operators read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, hooks, reference, score_hooks  # noqa: F401, the latter to register its hooks
from ..backends import KERNELS, Reason
from ..checks.attention import check_aux, check_bias, check_by_head, check_relative_bias
from ..checks.errors import refuse, spreads
from ..checks.options import check_flag, check_integer, check_number, check_scale
from ..checks.reading import is_readable
from ..checks.tensors import check_on
from ..mask_values import Band, Mask, joined, rule_of_tensor
from ..masks import check_mask, window_band
from ..ops.attention_hopper_reasons import hopper_attention_reasons
from ..variant import (
    AUX,
    NUMBERS,
    OF_HEADS,
    VARIABLES,
    Variant,
    has_gradient,
    reasons,
    variant_of,
)
from .attention_torch import attention_by_torch
from .autocast import without_autocast
from .cached import held_names
from .dropout import dropout_options
from .mask_tables import table_of

if backends.HAS_TRITON:
    from ..ops import attention as attention_op
    from ..ops.call import Call
else:
    Call = ()  # type: ignore[assignment, misc]  # of which nothing is an instance

FROM_MASKS = ("begin", "end", "bits", "table")
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


class Request(NamedTuple):
    """Attention of q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] for an operator, whom
    errors name.  Its arguments are checked.

    results: numbers of the kernels' outputs: 0 out, 1 lse, then those of variant.AUX.
    inputs: what the kernels take for q, k and v, by the caller's names: these, [T, H, D] of sequences
        side by side, or a fused projection with `heads` query and key heads.
    mask: of which the variant's intervals and table are.
    deterministic: the backward gives the same bits each time.
    num_splits: of the keys at most, in the forward; 0, as many as are best.
    """

    operator: str
    q: Tensor
    k: Tensor
    v: Tensor
    variant: Variant
    scale: float | None
    results: tuple[int, ...]
    inputs: dict[str, Tensor]
    heads: tuple[int, int] | None = None
    mask: Mask | None = None
    deterministic: bool = False
    num_splits: int = 0

    def reasons(self, backend: str) -> Iterator[Reason]:
        """Why a backend does not take it."""
        q, k, v = self.q, self.k, self.v
        yield from reasons(backend, self.variant, q, k, v, 1 in self.results)
        if backend == "torch" and backends.has_tangents((q, k, v)):
            yield "PyTorch's kernels of attention have no forward-mode derivative (jvp)"
        if (
            backend == "torch"
            and self.deterministic
            and not (q.is_cpu or torch.are_deterministic_algorithms_enabled())
        ):
            yield "its backward is deterministic under torch.use_deterministic_algorithms alone"
        if backend == "torch" and not self.variant.top_left and backends.is_inside("vmap"):
            yield "PyTorch's kernels of attention have no rule for torch.func.vmap"
        if backend == "torch" and backends.has_dtensors((q, k, v)):
            fused = q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] == v.shape[3]
            if q.device.type != "cuda" or not fused:
                yield "PyTorch shards its fused attention on a GPU alone, in 16 bits and with Dv = D"
        if backend == "hopper":
            yield from hopper_attention_reasons(q, k, v, self.variant.kind.TABLE)

    def choose(self, impl: str | None) -> str:
        return backends.choose(self.operator, impl, tuple(self.inputs.values()), self.reasons)

    def run(self, impl: str | None) -> Any:
        """Its results by the backend chosen for it; of kernels a Call where there can be one."""
        return self.run_by(self.choose(impl))

    def run_by(self, backend: str) -> Any:
        """Its results by a backend that takes it."""
        if self.variant.kind.TABLE and "table" not in self.variant.named:
            return self.with_table(backend in KERNELS).run_by(backend)
        negative_projection = self.heads is not None and self.scale_given < 0
        if backend in KERNELS and not negative_projection:
            return self.bind(backend)
        if backend in KERNELS:
            made: tuple[Any, ...] = (self.by_heads().made_by(backend),)
        else:
            made = (self._by_torch(),) if backend == "torch" else self._by_reference()
        if self.heads is not None:
            made = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in made)
        if self.variant.kind.VARLEN:
            # A squeeze is a view backward too; the gradient of made[0] is written into zeros.
            made = (made[0].squeeze(0).transpose(0, 1), *(x.squeeze(0) for x in made[1:]))
        return made[0] if len(made) == 1 else made

    def with_table(self, by_kernel: bool) -> Request:
        """Itself with its mask's table, which it has not yet."""
        (B, Hq, Sq, _), Sk = self.q.shape, self.k.shape[2]
        assert self.mask is not None and self.mask.rule is not None
        made = table_of(self.mask.rule, Sq, Sk, B, Hq, self.q.device, by_kernel)
        check_rows(self.operator, self.mask, made.table, B, Hq)
        named = self.variant.named | made._asdict()
        named = {name: named[name] for name in VARIABLES if name in named}
        return self._replace(variant=self.variant._replace(named=named))

    def by_heads(self) -> Request:
        """Itself on q, k and v in place of a fused projection, and on what is made of a mask in its
        place."""
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        return self._replace(heads=None, mask=None, inputs=inputs)

    def made_by(self, backend: str) -> Any:
        """run_by, and where that is a Call, made."""
        request = self
        if backend in KERNELS and self.mask is not None:
            request = self.with_table(True) if self.variant.kind.TABLE else self
            request = request._replace(mask=None)
        made = request.run_by(backend)
        return made(*request._tensors.values()) if isinstance(made, Call) else made

    # --- kernels ---

    @property
    def scale_given(self) -> float:
        return self.q.shape[3] ** -0.5 if self.scale is None else float(self.scale)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """The kernels' inputs by name."""
        return self.inputs | self.variant.tensors

    def _settings(self, backend: str) -> tuple[Any, Any]:
        """(operator, settings) of the kernels."""
        operator = attention_op.attention if self.heads is None else attention_op.attention_qkv
        scale = self.scale_given  # whose abs() would be a symbol of torch.compile
        values = self.variant.form, -scale if scale < 0 else scale, backend, self.deterministic
        return operator, operator.settings(*values, *(self.heads or (self.num_splits,)))

    def bind(self, backend: str) -> Any:
        """A Call of the caller's tensors; or the results themselves, see Operator.bind."""
        (operator, settings), inputs = self._settings(backend), self._tensors
        negative, first = self.scale_given < 0, next(iter(inputs))
        if negative:
            inputs[first] = -inputs[first]
        made = operator.bind(tuple(inputs.values()), settings, self.results, list(inputs))
        if isinstance(made, Call):
            return self._of_given(made, inputs, negative)
        if self.results[-1] >= 2 and torch.compiler.is_compiling():
            # What is traced has a gradient of everything that might have one: it may not raise.
            stopped = [i + 2 for i, name in enumerate(AUX) if not has_gradient(name, backend)]
            made = tuple(
                x.detach() if i in stopped else x for i, x in zip(self.results, made, strict=True)
            )
        return made

    def _of_given(self, call: Any, inputs: dict[str, Tensor], negative: bool) -> Any:
        """The call of what is passed to the caller: of a mask's tensors in place of its intervals."""
        if self.mask is None and not negative:
            return call
        given = {name: x for name, x in inputs.items() if self.mask is None or name not in FROM_MASKS}
        n, made_of = len(given), None
        if self.mask is not None:
            given |= zip(held_names("mask", self.mask), self.mask.tensors, strict=True)
            lengths = self.q.shape[2], self.k.shape[2]
            if self.mask.is_intervals(*lengths):
                call = replace(call, names=list(given))
            else:
                made_of = made_of_tensors(self.mask, self.q, *lengths)

        def prepare(*tensors: Tensor) -> list[Tensor]:
            first, *others = tensors if made_of is None else tensors[:n]
            first = -first if negative else first
            return [first, *others, *(() if made_of is None else made_of(tensors[n:]))]

        if made_of is None and not negative:
            return call
        return call.after(list(given), list(given.values()), prepare)

    def gradients(
        self, backend: str, rows: Sequence[Any], needs: tuple[bool, ...], wanted: dict[str, bool]
    ) -> Any:
        """The gradients of q, k and v, and of the variant's tensors by their names.

        rows: gradients of out and lse, out and lse of all keys.  wanted: by names of tensors.
        """
        operator, settings = self._settings(backend)
        inputs = self._tensors
        names = list(inputs)[3:]
        needs = *needs, *(wanted.get(name, False) for name in names)
        q, k, v, *tensors = inputs.values()
        given = attention_op.backward_inputs(rows, q, k, v, tensors)
        dq, dk, dv, *others = operator.gradients_visibly(settings, needs, given)
        return dq, dk, dv, {n: x for n, x in zip(names, others, strict=True) if x is not None}

    # --- other backends ---

    def _by_reference(self) -> tuple[Tensor, ...]:
        """The definition."""
        q, k, v, variant = self.q, self.k, self.v, self.variant
        statistics, named, offset = self.results[-1] >= 2, variant.named, variant.offset
        given: dict[str, Any] = {"causal": variant.kind.CAUSAL, "scale": self.scale}
        given["return_aux"] = statistics
        if variant.score_mod is not None:
            named = named | {"score_mod": hooks.define_score(variant.score_mod)}
        boundaries = [named[name] for name in BOUNDARIES if name in named]
        with without_autocast(q):
            if boundaries and all(map(is_readable, boundaries)):
                given |= {name: x for name, x in named.items() if name not in BOUNDARIES}
                numbers = itertools.count()

                def of_sequence(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
                    diagonal, number = k.shape[2] - q.shape[2] + offset, next(numbers)
                    return reference.attention(
                        q, k, v, causal_offset=diagonal, sequence=number, **given
                    )

                made = self._each_sequence(of_sequence)
            else:
                made = reference.attention(q, k, v, causal_offset=offset, **given, **named)
        return tuple(made[i] for i in self.results)

    def _by_torch(self) -> Tensor:
        if self.variant.kind.VARLEN:
            return self._each_sequence(lambda *x: (self.of_sequence(*x)._by_torch(),))[0]
        return attention_by_torch(self.q, self.k, self.v, self.variant, self.mask, self.scale)

    def _each_sequence(self, function: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """reference.each_sequence of q, k and v, whose lengths can be read."""
        given = (self.variant.named.get(name) for name in BOUNDARIES)
        lengths: Any = (x if x is None else x.tolist() for x in given)
        return reference.each_sequence(function, self.q, self.k, self.v, *lengths)

    def of_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Request:
        """The same of one sequence, [1, H, S, D]: bands alone, from its own diagonal on."""
        kind, offset, named = self.variant
        bands = {name: x for name, x in named.items() if not isinstance(x, Tensor)}
        variant = Variant(replace(kind, VARLEN=False), offset + k.shape[2] - q.shape[2], bands)
        return self._replace(q=q, k=k, v=v, variant=variant)


# --- from arguments -------------------------------------------------------------------------------


def attention_request(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    inputs: dict[str, Tensor] | None = None,
    heads: tuple[int, int] | None = None,
    lengths: tuple[int, int] | None = None,
    causal: object = False,
    bands: Sequence[Band] = (),
    window: object = None,
    mask: object = None,
    scale: float | None = None,
    return_lse: object = False,
    return_aux: object = (),
    deterministic: object = False,
    num_splits: object = None,
    dropout_p: object = 0.0,
    dropout_seed: object = None,
    **options: Any,
) -> Request:
    """A Request of arguments, which are checked, but for q, k and v.

    lengths: Sq and Sk by which bands and masks go, if not q's and k's.  options: those of
    variant.VARIABLES that are given by themselves.
    """
    Sq, Sk = (q.shape[2], k.shape[2]) if lengths is None else lengths
    results: tuple[int, ...] = (0, 1) if check_flag(operator, "return_lse", return_lse) else (0,)
    aux = check_aux(operator, return_aux)
    results += tuple(2 + AUX.index(name) for name in aux)
    bands = (*bands, Band(None, 0, 0, False)) if check_flag(operator, "causal", causal) else (*bands,)
    if window is not None:
        bands += (check_window(operator, window),)
    found = None
    if mask is not None:
        mask = check_mask(operator, mask)
        bands += mask.bands
        found = check_intervals(operator, mask, q, Sq, Sk)
        options |= dict(zip(FROM_MASKS, found or (), strict=False))
        check_rule(operator, mask, q, Sq, Sk)
    high, low, first = joined(operator, bands, Sk - Sq)
    offset = Sk - Sq if high is None else high
    inputs = {"q": q, "k": k, "v": v} if inputs is None else inputs
    mod = options.get("score_mod")
    operands = mod.operands if isinstance(mod, hooks.Call) else ()
    check_dtensors(operator, inputs, options | {f"score_mod[{i}]": x for i, x in enumerate(operands)})
    for name in OF_HEADS:
        if options.get(name) is not None:
            check_by_head(operator, name, options[name], q.shape[1], q.device)
    if options.get("bias") is not None:
        check_bias(operator, options["bias"], (*q.shape[:3], k.shape[2]), q.device)
    if mod is not None:
        tensors = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
        hooks.check_score_mod(operator, mod, (*q.shape[:3], k.shape[2]), q.device, tensors)
    of_distance = options.get("relative_bias"), options.get("relative_offset", 0)
    options["relative_offset"] = check_relative_bias(operator, *of_distance, q.shape[1], q.device)
    options |= dropout_options(operator, dropout_p, dropout_seed, q)
    for name, of in NUMBERS.items():
        if options.get(name) is not None:
            bounds = *of, "Pass None for none."
            options[name] = float(check_number(operator, name, options[name], *bounds))
    named = {"left": None if low is None else offset - low, "first": first or None, **options}
    exact = q.dtype in (torch.float32, torch.float64)
    variant = variant_of(high is not None, offset, named, aux, exact)
    scale = check_scale(operator, scale)
    shown = mask if found is not None else None
    if mask is not None and mask.rule is not None:  # whose table is made for a backend
        shown, variant = mask, variant._replace(kind=replace(variant.kind, TABLE=True))
    deterministic = check_flag(operator, "deterministic", deterministic)
    parts = check_num_splits(operator, num_splits)
    return Request(
        operator, q, k, v, variant, scale, results, inputs, heads, shown, deterministic, parts
    )


def check_num_splits(operator: str, num_splits: object) -> int:
    """0 for None."""
    if num_splits is None:
        return 0
    takes, do = "None or an integer of 1 or more", "Pass 1 for none, or None to let flashproto choose."
    return check_integer(operator, "num_splits", num_splits, 1, 2**31 - 1, takes, do)


def check_window(operator: str, window: object) -> Band:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        refuse(
            operator,
            "window",
            window,
            "(left, right), integers of 0 or more, or None",
            "Pass (1023, 0), say, or None for no bound.",
            TypeError,
        )
    return window_band(operator, window[0], window[1], 0, "window")


def check_intervals(
    operator: str, mask: Mask, q: Tensor, Sq: int, Sk: int
) -> tuple[Tensor, Tensor] | None:
    """begin and end of a mask for q [B, Hq, .., D]; None where it is a band."""
    found = mask.intervals(Sq, Sk, operator, q.device)
    if found is None:
        return None
    B, Hq = q.shape[:2]
    check_on(operator, "mask", found[0], q.device)
    check_rows(operator, mask, found[0], B, Hq)
    return found


def check_rule(operator: str, mask: Mask, q: Tensor, Sq: int, Sk: int) -> None:
    """What of a mask is neither bands nor intervals, for q's device and these lengths."""
    if mask.rule is not None:
        mask.rule.check(operator, Sq, Sk)
        for x in mask.rule.tensors:
            check_on(operator, "mask", x, q.device)


def check_rows(operator: str, mask: Mask, made: Tensor, B: int, Hq: int) -> None:
    """What is made of a mask [batch, heads, ..], for B batch entries and Hq heads."""
    batch, heads = made.shape[:2]
    if not (spreads(batch, B) and spreads(heads, Hq)):
        refuse(
            operator,
            "mask",
            f"{mask!r}, for a batch of {batch} and {heads} heads",
            lambda: f"one for a batch of 1 or {B}, and 1 or {Hq} heads",
            "Make it of tensors for as many, or for 1.",
        )


def made_of_tensors(mask: Mask, q: Tensor, Sq: int, Sk: int) -> Callable[..., list[Tensor]]:
    """What a mask's intervals and table are, as a function of its tensors, of which it keeps none."""
    device, (B, Hq) = q.device, q.shape[:2]
    vectors = mask.computation(Sq, Sk, device) if mask.parts else None
    rule = None if mask.rule is None or mask.rule.dense is not None else mask.rule
    dense = mask.rule is not None and rule is None

    def made(tensors: Sequence[Tensor]) -> list[Tensor]:
        found = [] if vectors is None else [*vectors(tensors)]
        own = rule_of_tensor(tensors[-1]) if dense else rule
        return found if own is None else [*found, *table_of(own, Sq, Sk, B, Hq, device, True)]

    return made


def check_dtensors(operator: str, inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    """That all tensors are DTensors, or none of them."""
    name, *_ = inputs
    distributed = backends.has_dtensors((inputs[name],))
    for other, x in (inputs | options).items():
        if not isinstance(x, Tensor) or backends.has_dtensors((x,)) == distributed:
            continue
        if not distributed:
            got = f"a DTensor beside a plain {name}"
            refuse(operator, other, got, "a plain tensor", f"Pass {other}.to_local().", TypeError)
        if other in FROM_MASKS:
            refuse(
                operator,
                "mask",
                f"made of plain tensors beside a DTensor {name}",
                "bands, causal() and window(...), beside DTensors",
                "Pass the .to_local() of all DTensors.",
                TypeError,
            )
        refuse(
            operator,
            other,
            f"a plain tensor beside a DTensor {name}",
            "a DTensor",
            f"Pass torch.distributed.tensor.distribute_tensor({other}, {name}.device_mesh).",
            TypeError,
        )
