"""Norms into 8-bit floats with a scale for each row, against float64 and the reference."""

from __future__ import annotations

import pytest
import torch
from rows import LAYOUTS, in_memory
from torch import Tensor

import flashproto
from flashproto import hooks, reference
from flashproto.nn import LayerNorm, RMSNorm

pytest.importorskip("triton")

EPS = 1e-5
bf16, f32 = torch.bfloat16, torch.float32
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True)
def _needs_float8(device) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")


def call(name: str, x: Tensor, weight: Tensor | None, **options) -> tuple[Tensor, ...]:
    affine = (weight, None) if "layer" in name else (weight,)
    return getattr(flashproto, name)(x, x.shape[-1], *affine, EPS, **options)


def check(
    name: str, x: Tensor, weight: Tensor | None, dtype: torch.dtype, far: bool = False, **options
) -> None:
    """out * scale against y in float64: half a step of the format beside rounding in float32; far: and
    that of the mean."""
    residual = options.get("residual")
    out, scale, *total = call(name, x, weight, dtype=dtype, impl="triton", **options)
    sum_ = x if residual is None else x + residual
    off = 0.0  # of y, where the mean is off by a unit in its last place
    if far:
        z = sum_.double()
        rstd = (z.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
        off = torch.finfo(f32).eps * z.mean(-1, keepdim=True).abs() * rstd * weight.abs().max()
    if residual is not None:
        assert torch.equal(total[0], sum_)
    N, w = x.shape[-1], None if weight is None else weight.double()
    y = reference.norm(
        sum_.double(),
        [N],
        w,
        None,
        EPS,
        centered="layer" in name,
        casting=options.get("casting", "torch"),
    )
    info = torch.finfo(dtype)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert (scale.shape, scale.dtype) == ((*x.shape[:-1], 1), f32)
    largest = y.abs().amax(-1, keepdim=True)
    wanted = (largest / info.max).clamp_min(2.0**-126)
    assert ((scale.double() - wanted).abs() <= 2e-5 * wanted + off / info.max).all()
    q = y / scale.double()
    # Steps are eps of the power of two below, those of subnormal numbers eps of the smallest normal.
    step = info.eps * (2.0 ** q.abs().log2().floor()).clamp_min(info.smallest_normal)
    allowed = 0.5 * step + 2e-5 * q.abs() + 1e-5 * step.amax(-1, True) + off / scale.double()
    assert ((out.double() - q).abs() <= allowed).all()
    if N:
        used = out.double().abs().amax(-1)
        assert ((used == info.max) | (largest[..., 0] == 0)).all()


@pytest.mark.parametrize("N", [48, 1000, 1536, 17000])
def test_far_from_zero(device, N) -> None:
    """In float32 no more than the rounding of the mean shows in the scale and in y."""
    mean = torch.tensor([0.0, 3.0, 1e2, 3e3, -3e3, 3e4, 1e5], device=device)[:, None]
    x = torch.randn(7, N, device=device) + mean
    check("layer_norm_fp8", x, torch.randn(N, device=device), FORMATS[0], far=True)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", ["layer_norm_fp8", "rms_norm_fp8"])
@pytest.mark.parametrize("N", [1, 3, 100, 768, 5120, 9000, 17000])
def test_against_float64(device, name, N, dtype) -> None:
    x = torch.randn(3, N, device=device)
    if N == 1 and "layer" in name:
        x.zero_()  # what is left of a deviation of 0 is rounding, which the scale would blow up
    check(name, x.to(bf16), torch.randn(N, device=device), dtype)


@pytest.mark.parametrize("N", [100, 17000])
def test_residual_and_strides(device, N) -> None:
    for layout in LAYOUTS:
        x, residual = (in_memory(torch.randn(4, N, device=device), layout) for _ in range(2))
        weight = torch.randn(N, device=device, dtype=bf16)
        check("rms_norm_fp8", x.to(bf16), weight, FORMATS[0], residual=residual)


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "N", [64, 256, 1536, 2048, 4096, 7168, 8192, 12288, 16384, 50257, 131072, 2**20]
)
def test_every_width(device, N, residual) -> None:
    x = torch.randn(min(5000, 2**22 // N), N, device=device, dtype=bf16)
    options = {"residual": torch.randn(x.shape, device=device)} if residual else {}
    for name in ("layer_norm_fp8", "rms_norm_fp8"):
        check(name, x, torch.randn(N, device=device), FORMATS[0], **options)


@pytest.mark.parametrize("casting", ["torch", "gemma"])
def test_castings_and_shapes(device, casting) -> None:
    x = torch.randn(2, 3, 40, device=device, dtype=bf16)
    check("rms_norm_fp8", x, torch.randn(40, device=device), FORMATS[0], casting=casting)
    out, scale = flashproto.layer_norm_fp8(x, (3, 40), impl="triton")
    assert (out.shape, scale.shape) == ((2, 3, 40), (2, 1, 1))


@pytest.mark.parametrize("N", [40, 17000])
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_of_nothing_and_of_nan(device, N, dtype) -> None:
    x = torch.randn(5, N, device=device)
    x[1] = 0.0
    x[2, N // 2] = float("nan")
    out, scale = flashproto.rms_norm_fp8(x, N, dtype=dtype, impl="triton")
    assert not out[1].float().any()
    assert scale[1] == 2.0**-126
    assert out[2].float().isnan().all()
    assert not out[[0, 1, 3, 4]].float().isnan().any()
    assert scale[[0, 1, 3, 4]].isfinite().all()


def test_rows_do_not_depend_on_each_other_and_repeat_bitwise(device) -> None:
    for N in (24, 1000, 17000):
        x = torch.randn(5, N, device=device, dtype=bf16)
        whole = flashproto.rms_norm_fp8(x, N, impl="triton")
        again = flashproto.rms_norm_fp8(x, N, impl="triton")
        alone = flashproto.rms_norm_fp8(x[3:4], N, impl="triton")
        for a, b, c in zip(whole, again, alone, strict=True):
            assert torch.equal(a.float(), b.float())
            assert torch.equal(a[3:4].float(), c.float())


@pytest.mark.parametrize("dtype", FORMATS)
def test_hooks(device, dtype) -> None:
    x, z = (torch.randn(6, 100, device=device) for _ in range(2))
    weight = torch.randn(100, device=device)
    gate, seed = hooks.call("silu_gate", z), torch.tensor(3, device=device)
    for options in ({"epilogue": gate}, {"prologue": hooks.dropout(0.3, seed), "residual": z}):
        got, wanted = (
            call("layer_norm_fp8", x, weight, dtype=dtype, impl=impl, **options)
            for impl in ("triton", "reference")
        )
        torch.testing.assert_close(got[1], wanted[1])
        a, b = got[0].float(), wanted[0].float()
        # float32 rounds y differently now and then: one step of the format there
        assert (a != b).double().mean() < 0.01
        assert ((a - b).abs() <= torch.finfo(dtype).eps * b.abs() + 1e-2).all()


def test_modules(device) -> None:
    x = torch.randn(4, 24, device=device)
    for module, name in ((RMSNorm(24, EPS), "rms_norm_fp8"), (LayerNorm(24, EPS), "layer_norm_fp8")):
        module = module.to(device)
        with torch.no_grad():
            out, scale = module.fp8(x)
            _, _, total = module.fp8(x, x, dtype=torch.float8_e5m2)
        wanted = call(name, x, None)
        assert torch.equal(out.float(), wanted[0].float())
        assert torch.equal(scale, wanted[1])
        assert torch.equal(total, x + x)


def test_compiles_in_one_graph(device) -> None:
    x, weight = torch.randn(4, 24, device=device), torch.randn(24, device=device)

    def f(x):
        return flashproto.rms_norm_fp8(x, 24, weight, residual=x, impl="triton")

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(f, fullgraph=True, backend=backend)(x)
    for a, b in zip(compiled, f(x), strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_no_elements(device, shape) -> None:
    for impl in ("triton", "reference"):
        x = torch.randn(shape, device=device)
        out, scale = flashproto.rms_norm_fp8(x, shape[-1], impl=impl)
        assert (out.shape, scale.shape) == (shape, (shape[0], 1))
        assert (scale == 2.0**-126).all()


def test_errors(device) -> None:
    x = torch.randn(3, 8, device=device)
    with pytest.raises(TypeError, match=r"dtype is torch.float16; it takes torch.float8_e4m3fn"):
        flashproto.rms_norm_fp8(x, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="a tensor that is differentiated"):
        flashproto.rms_norm_fp8(x.clone().requires_grad_(), 8)
    with pytest.raises((ValueError, RuntimeError)):
        torch.func.jvp(lambda x: flashproto.rms_norm_fp8(x, 8)[1], (x,), (x,))
    with torch.no_grad():
        flashproto.rms_norm_fp8(x.clone().requires_grad_(), 8)
