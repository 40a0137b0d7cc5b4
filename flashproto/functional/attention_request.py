"""A request for attention: what every public function of attention makes of its arguments, once, and
what reasons, the choice of a backend and the operators read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, reference
from ..backends import KERNELS, Reason
from ..checks import (
    check_aux,
    check_by_head,
    check_flag,
    check_integer,
    check_number,
    check_on,
    check_scale,
    is_readable,
    refuse,
    spreads,
)
from ..mask_values import Band, Mask, joined
from ..masks import check_mask, window_band
from ..ops.attention_hopper_reasons import hopper_attention_reasons
from ..variant import (
    AUX,
    DIFFERENTIABLE,
    NO_GRADIENT,
    NUMBERS,
    Variant,
    reasons,
    variant_of,
)
from .attention_torch import attention_by_torch
from .autocast import without_autocast
from .cached import held_names

if backends.HAS_TRITON:
    from ..ops import attention as attention_op
    from ..ops.call import Call
else:
    Call = ()  # type: ignore[assignment, misc]  # of which nothing is an instance

INTERVALS = ("begin", "end")
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_k")


class Request(NamedTuple):
    """Attention of q [B, Hq, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] for an operator, whom
    errors name.  Its arguments are checked.

    results: numbers of the kernels' outputs: 0 out, 1 lse, then those of variant.AUX.
    inputs: what the kernels take for q, k and v, by the caller's names: these, [T, H, D] of sequences
        side by side, or a fused projection with `heads` query and key heads.
    mask: of which the variant's intervals are.
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
            yield from hopper_attention_reasons(q, k, v)

    def choose(self, impl: str | None) -> str:
        return backends.choose(self.operator, impl, tuple(self.inputs.values()), self.reasons)

    def run(self, impl: str | None) -> Any:
        """Its results by the backend chosen for it; of kernels a Call where there can be one."""
        return self.run_by(self.choose(impl))

    def run_by(self, backend: str) -> Any:
        """Its results by a backend that takes it."""
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

    def by_heads(self) -> Request:
        """Itself on q, k and v in place of a fused projection, and on intervals in place of a mask."""
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        return self._replace(heads=None, mask=None, inputs=inputs)

    def made_by(self, backend: str) -> Any:
        """run_by, and where that is a Call, made."""
        made = self.run_by(backend)
        return made(*self._tensors.values()) if isinstance(made, Call) else made

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
            made = tuple(x if i < 2 else x.detach() for i, x in zip(self.results, made, strict=True))
        return made

    def _of_given(self, call: Any, inputs: dict[str, Tensor], negative: bool) -> Any:
        """The call of what is passed to the caller: of a mask's tensors in place of its intervals."""
        if self.mask is None and not negative:
            return call
        given = {name: x for name, x in inputs.items() if self.mask is None or name not in INTERVALS}
        n, intervals = len(given), None
        if self.mask is not None:
            given |= zip(held_names("mask", self.mask), self.mask.tensors, strict=True)
            lengths = self.q.shape[2], self.k.shape[2]
            if self.mask.is_intervals(*lengths):
                call = replace(call, names=list(given))
            else:
                intervals = self.mask.computation(*lengths)

        def prepare(*tensors: Tensor) -> list[Tensor]:
            first, *others = tensors if intervals is None else tensors[:n]
            first = -first if negative else first
            return [first, *others, *(() if intervals is None else intervals(tensors[n:]))]

        if intervals is None and not negative:
            return call
        return call.after(list(given), list(given.values()), prepare)

    def gradients(
        self, backend: str, rows: Sequence[Any], needs: tuple[bool, ...], wanted: dict[str, bool]
    ) -> Any:
        """The gradients of q, k and v, and of the variant's tensors by their names.

        rows: gradients of out and lse, out and lse of all keys.  wanted: by names of tensors.
        """
        operator, settings = self._settings(backend)
        dout, dlse, out, lse = rows
        inputs = self._tensors
        names = list(inputs)[3:]
        needs = *needs, *(wanted.get(name, False) for name in names)
        q, k, v, *tensors = inputs.values()
        given = dout, dlse, *[None] * len(AUX), q, k, v, out, lse, *tensors
        dq, dk, dv, *others = operator.gradients_visibly(settings, needs, given)
        return dq, dk, dv, {n: x for n, x in zip(names, others, strict=True) if x is not None}

    # --- other backends ---

    def _by_reference(self) -> tuple[Tensor, ...]:
        """The definition; statistics have no gradient, as on other backends."""
        q, k, v, variant = self.q, self.k, self.v, self.variant
        statistics, named, offset = self.results[-1] >= 2, variant.named, variant.offset
        given: dict[str, Any] = {"causal": variant.kind.CAUSAL, "scale": self.scale}
        given["return_aux"] = statistics
        starts = [named[name] for name in BOUNDARIES if name in named]
        with without_autocast(q):
            if starts and all(map(is_readable, starts)):
                given |= {name: x for name, x in named.items() if name not in BOUNDARIES}

                def of_sequence(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
                    diagonal = k.shape[2] - q.shape[2] + offset
                    return reference.attention(q, k, v, causal_offset=diagonal, **given)

                made = reference.each_sequence(of_sequence, q, k, v, *(x.tolist() for x in starts))
            else:
                made = reference.attention(q, k, v, causal_offset=offset, **given, **named)
        if not statistics:
            return made[: len(self.results)]

        def without_gradient(i: int) -> Tensor:
            if torch.compiler.is_compiling():
                return made[i].detach()
            return NoGradient.apply(made[i], AUX[i - 2])

        return tuple(made[i] if i < 2 else without_gradient(i) for i in self.results)

    def _by_torch(self) -> Tensor:
        if self.variant.kind.VARLEN:
            return torch.cat([x._by_torch() for x in self._sequences()], 2)
        return attention_by_torch(self.q, self.k, self.v, self.variant, self.mask, self.scale)

    def _sequences(self) -> Iterator[Request]:
        """Each sequence that has queries; then the tokens behind them all, which see no key."""
        named: dict[str, Any] = self.variant.named
        own, own_k = (named[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        queries = self.q.split([*own, self.q.shape[2] - sum(own)], 2)
        keys, values = (
            [*x.split([*own_k, x.shape[2] - sum(own_k)], 2)[:-1], x[:, :, :0]] for x in (self.k, self.v)
        )
        for q, k, v in zip(queries, keys, values, strict=True):
            if q.shape[2]:
                yield self.of_sequence(q, k, v)

    def of_sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Request:
        """The same of one sequence, [1, H, S, D]: bands alone, from its own diagonal on."""
        kind, offset, named = self.variant
        bands = {name: x for name, x in named.items() if not isinstance(x, Tensor)}
        variant = Variant(replace(kind, VARLEN=False), offset + k.shape[2] - q.shape[2], bands)
        return self._replace(q=q, k=k, v=v, variant=variant)


class NoGradient(torch.autograd.Function):
    """x; whoever asks for its gradient is told that there is none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, name):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, gradient):
        if gradient is not None:
            raise NotImplementedError(NO_GRADIENT.format(ctx.name))
        return None, None


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
        options |= dict(zip(INTERVALS, found or (), strict=found is not None))
    high, low, first = joined(operator, bands, Sk - Sq)
    offset = Sk - Sq if high is None else high
    inputs = {"q": q, "k": k, "v": v} if inputs is None else inputs
    check_dtensors(operator, inputs, options)
    for name in DIFFERENTIABLE:
        if options.get(name) is not None:
            check_by_head(operator, name, options[name], q.shape[1], q.device)
    for name, of in NUMBERS.items():
        if options.get(name) is not None:
            bounds = *of, of.takes, "Pass None for none."
            options[name] = float(check_number(operator, name, options[name], *bounds))
    named = {"left": None if low is None else offset - low, "first": first or None, **options}
    exact = q.dtype in (torch.float32, torch.float64)
    variant = variant_of(high is not None, offset, named, aux, exact)
    scale = check_scale(operator, scale)
    shown = mask if found is not None else None
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
    found = mask.intervals(Sq, Sk, operator)
    if found is None:
        return None
    B, Hq = q.shape[:2]
    check_on(operator, "mask", found[0], q.device)
    batch, heads, _ = found[0].shape
    if not (spreads(batch, B) and spreads(heads, Hq)):
        refuse(
            operator,
            "mask",
            f"{mask!r}, for a batch of {batch} and {heads} heads",
            lambda: f"one for a batch of 1 or {B}, and 1 or {Hq} heads",
            "Expand what it is made of.",
        )
    return found


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
        if other in INTERVALS:
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
