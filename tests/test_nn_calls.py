"""What is put in a module's place, hooked to it or sharded works in Attention, TransformerBlock and GPT
as in any torch model: the module is called."""

from __future__ import annotations

import collections
import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrize

from flashproto import nn
from flashproto.nn import GPTConfig
from flashproto.nn.layers import is_as_made, is_plain

TINY = GPTConfig(vocab_size=61, context=24, n_layers=2, n_heads=4, d_model=32)
LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "bias": False, "n_kv_heads": 2}
UNTIED = {"tie_weights": False}
NORMS = ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "norm"]
LINEARS = ["blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.1.mlp.up", "blocks.1.mlp.down"]
TABLES = ["embedding", "positions"]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def gpt(**parts: object) -> nn.GPT:
    torch.manual_seed(1)
    return nn.GPT(dataclasses.replace(TINY, **parts), impl="torch")


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(61, (2, 2, 11), generator=torch.Generator().manual_seed(0))
    targets[0, :4] = -100
    return tokens, targets


def one_by_one(model: nn.GPT, tokens: Tensor) -> Tensor:
    """The logits of a model whose modules are called with one tensor each, as torch's are."""
    h, rope = model.embedding(tokens), None
    if model.positions is not None:
        h = h + model.positions(torch.arange(tokens.shape[1]))
    else:
        rope = nn.rope_tables(tokens.shape[1], model.config.head_dim)
    for block in model.blocks:
        h = h + block.attention(block.norm1(h), rope)
        h = h + block.mlp(block.norm2(h))
    h = model.norm(h)
    if model.head is None:
        return h @ model.embedding(torch.arange(model.config.vocab_size)).mT
    return model.head(h)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients(loss: Tensor, model: torch.nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters()]


def check_equals_one_by_one(model: nn.GPT, batch: tuple[Tensor, Tensor]) -> None:
    """Logits, loss and gradients, with the logits returned and without."""
    want = one_by_one(model, batch[0])
    wanted = gradients(loss_of(want, batch[1]), model)
    assert all(g is not None and g.abs().amax() > 0 for g in wanted)
    logits, loss = model(*batch)
    close(logits, want)
    for got in (loss, model(*batch, return_logits=False)[1]):
        close(got, loss_of(want, batch[1]))
        for a, b in zip(gradients(got, model), wanted, strict=True):
            close(a, b)


# --- ways to change a module ----------------------------------------------------------------------


class Adapter(torch.nn.Module):
    """As LoRA: base(x), and beside it a product of two small matrices."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        n_in, n_out = base.weight.shape[-1], base.weight.shape[0]
        if isinstance(base, torch.nn.Embedding):
            n_in, n_out = base.weight.shape
        self.A = torch.nn.Parameter(torch.randn(n_in, 3) * 0.1)
        self.B = torch.nn.Parameter(torch.randn(3, n_out) * 0.1)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: getattr(self.base, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        beside = self.A[x] if x.dtype == torch.int64 else x @ self.A
        return self.base(x) + beside @ self.B


class Half(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Packed(Tensor):
    """A weight that counts twice, as a quantized one is another than its numbers."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(args[0], 2 * args[1].as_subclass(Tensor), *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


def put(model: nn.GPT, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def adapt(model, name):
    put(model, name, Adapter(model.get_submodule(name)))


def identity(model, name):
    put(model, name, torch.nn.Identity())


def double_after(model, name):
    model.get_submodule(name).register_forward_hook(lambda module, inputs, y: 2 * y)


def halve_before(model, name):
    model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))


def double_forward(model, name):
    module = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


def parametrized(model, name):
    parametrize.register_parametrization(model.get_submodule(name), "weight", Half())


def weight_norm_by_hook(model, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model.get_submodule(name))
    with torch.no_grad():
        model.get_submodule(name).weight_g.mul_(2)  # the weight follows at the next call


def compiled(model, name):
    put(model, name, torch.compile(model.get_submodule(name), backend="eager"))


def packed(model, name):
    module = model.get_submodule(name)
    module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(Packed))


def torchs_own(model, name):
    norm = model.get_submodule(name)
    kind = torch.nn.LayerNorm if isinstance(norm, torch.nn.LayerNorm) else torch.nn.RMSNorm
    put(model, name, kind(norm.normalized_shape, norm.eps))


def subclass(model, name):
    kind = type(model.get_submodule(name))
    model.get_submodule(name).__class__ = type(
        "Other", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)}
    )


WAYS = [
    (adapt, [*NORMS, *LINEARS, *TABLES, "head"]),
    (identity, NORMS),
    (double_after, [*NORMS, *LINEARS, *TABLES, "head"]),
    (halve_before, [*NORMS, *LINEARS, "head"]),
    (double_forward, [*NORMS, *LINEARS, *TABLES, "head"]),
    (parametrized, [*NORMS, *LINEARS, *TABLES, "head"]),
    (weight_norm_by_hook, [*LINEARS, *TABLES, "head"]),
    (packed, [*LINEARS, "head"]),
    (compiled, ["norm", "head", "positions"]),
    (torchs_own, NORMS),
    (subclass, [*NORMS, *LINEARS, *TABLES, "head"]),
]


@pytest.mark.parametrize(
    ("change", "name"),
    [(way, name) for way, names in WAYS for name in names],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_a_changed_module_has_its_effect(change, name, batch):
    before = gpt(**UNTIED)
    model = gpt(**UNTIED)
    change(model, name)
    check_equals_one_by_one(model, batch)
    if change not in (compiled, torchs_own) and not (change is halve_before and name in NORMS):
        assert (model(*batch)[0] - before(*batch)[0]).abs().amax() > 1e-4


@pytest.mark.parametrize("change", [adapt, parametrized, double_forward, compiled, weight_norm_by_hook])
def test_a_changed_tied_embedding_is_the_output_matrix_too(change, batch):
    model = gpt()
    change(model, "embedding")
    check_equals_one_by_one(model, batch)


def test_hooks_of_a_tied_embedding_see_the_tokens_alone(batch):
    model, seen = gpt(), []
    noise = torch.randn(32)
    model.embedding.register_forward_hook(lambda module, ids, y: seen.append(ids[0]) or y + noise)
    logits, _ = model(*batch)
    assert len(seen) == 1
    assert torch.equal(seen[0], batch[0])
    h = model.embedding(batch[0]) + model.positions(torch.arange(11))
    for block in model.blocks:
        h = h + block.attention(block.norm1(h))
        h = h + block.mlp(block.norm2(h))
    close(logits, model.norm(h) @ model.embedding.weight.mT)


@pytest.mark.parametrize("parts", [LLAMA, {**LLAMA, **UNTIED}], ids=["tied", "untied"])
def test_adapters_everywhere_in_a_llama(parts, batch):
    model = gpt(**parts)
    for name in [n for n, m in model.named_modules() if getattr(m, "weight", None) is not None]:
        adapt(model, name)
    check_equals_one_by_one(model, batch)
    assert model.flops_per_token() > gpt(**parts).flops_per_token()


def test_a_head_with_a_bias(batch):
    model = gpt(**UNTIED)
    model.head = torch.nn.Linear(32, 61)
    check_equals_one_by_one(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(*batch, return_logits=kept)[1] for kept in (True, False)]
    close(*losses, 1e-2)


# --- hooks ----------------------------------------------------------------------------------------


def called(model: torch.nn.Module) -> list[str]:
    """The names of modules that a forward pass calls: all but the root and lists."""
    return [n for n, m in model.named_modules() if n and not isinstance(m, torch.nn.ModuleList)]


@pytest.mark.parametrize("parts", [{}, UNTIED, LLAMA, {**LLAMA, **UNTIED}], ids=str)
@pytest.mark.parametrize("return_logits", [True, False])
def test_every_hook_runs_once(parts, return_logits, batch):
    model, count = gpt(**parts), collections.Counter()
    for name in called(model):
        module = model.get_submodule(name)

        def hook(*_, name=name, kind=None):
            count[name, kind] += 1

        module.register_forward_pre_hook(lambda *_, hook=hook: hook(kind="before"))
        module.register_forward_hook(lambda *_, hook=hook: hook(kind="after"))
        module.register_full_backward_hook(lambda *_, hook=hook: hook(kind="backward"))
        module.register_full_backward_pre_hook(lambda *_, hook=hook: hook(kind="before backward"))
    loss = model(*batch, return_logits=return_logits)[1]
    close(loss, gpt(**parts)(*batch)[1])
    loss.backward()
    kinds = ("before", "after", "backward", "before backward")
    assert count == {(name, kind): 1 for name in called(model) for kind in kinds}


def test_global_hooks_run_once_a_module(batch):
    model, count = gpt(**UNTIED), collections.Counter()
    names = {module: name for name, module in model.named_modules()}
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, inputs, y: count.update([names[module]])
    )
    try:
        model(*batch, return_logits=False)
    finally:
        hook.remove()
    assert count == dict.fromkeys(["", *called(model)], 1)


# --- what is fused --------------------------------------------------------------------------------


@pytest.fixture
def fused(monkeypatch) -> collections.Counter:
    """How often each fusion is taken."""
    count = collections.Counter()

    def watch(module, name):
        function = getattr(module, name)

        def seen(*inputs, **options):
            count[name] += 1
            return function(*inputs, **options)

        monkeypatch.setattr(module, name, seen)

    watch(nn.gpt, "linear_cross_entropy")
    for name in ("add_layer_norm", "add_rms_norm", "qk_norm_qkv", "attention_qkv"):
        watch(nn.norm.F, name)
    return count


@pytest.mark.parametrize("parts", [{}, UNTIED])
def test_a_plain_model_is_fused(parts, fused, batch):
    model = gpt(**parts)
    model(*batch, return_logits=False)
    assert fused == {"linear_cross_entropy": 1, "add_layer_norm": 4, "attention_qkv": 2}
    state = {name: t.clone() for name, t in model.state_dict().items()}
    torch.func.functional_call(model, state, batch, {"return_logits": False})
    assert fused == {"linear_cross_entropy": 2, "add_layer_norm": 8, "attention_qkv": 4}


@pytest.mark.parametrize(
    "change", [adapt, double_after, double_forward, parametrized, compiled, packed, subclass]
)
def test_a_changed_head_is_not_fused(change, fused, batch):
    model = gpt(**UNTIED)
    change(model, "head")
    assert model(*batch, return_logits=False)[0] is None
    assert fused["linear_cross_entropy"] == 0


@pytest.mark.parametrize("change", [adapt, double_after, double_forward, parametrized, subclass])
def test_a_changed_norm_is_not_fused(change, fused, batch):
    model = gpt()
    change(model, "blocks.1.norm1")
    model(*batch)
    assert fused["add_layer_norm"] == 3


def test_what_is_as_made():
    def case(change=None):
        model = torch.nn.ModuleDict({"x": nn.layers.Linear(3, 3)})
        if change is not None:
            change(model, "x")
        return [ask(model["x"], nn.layers.Linear) for ask in (is_plain, is_as_made)]

    assert case() == [True, True]
    for hook in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        register = f"register_{hook}"
        assert case(lambda m, n, r=register: getattr(m[n], r)(lambda *_: None)) == [True, False]
    assert case(lambda m, n: m[n].compile(backend="eager")) == [True, False]
    for change in (adapt, identity, parametrized, weight_norm_by_hook, compiled, packed, subclass):
        assert case(change) == [False, False]


def test_compiled_models_are_fused_alike_and_see_hooks(fused, batch):
    model = gpt(**UNTIED)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    want = gradients(model(*batch, return_logits=False)[1], model)
    fused.clear()
    for a, b in zip(gradients(run(*batch, return_logits=False)[1], model), want, strict=True):
        close(a, b)
    assert fused["linear_cross_entropy"] == 1
    double_after(model, "head")
    double_after(model, "positions")
    torch._dynamo.reset()
    fused.clear()
    close(run(*batch, return_logits=False)[1], loss_of(one_by_one(model, batch[0]), batch[1]))
    assert fused["linear_cross_entropy"] == 0


def test_compiled_model_with_adapters(batch):
    model = gpt(**LLAMA)
    for name in ("embedding", "norm", "blocks.0.norm2"):
        adapt(model, name)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    want = gradients(loss_of(one_by_one(model, batch[0]), batch[1]), model)
    for a, b in zip(gradients(run(*batch)[1], model), want, strict=True):
        close(a, b)


# --- QK norm --------------------------------------------------------------------------------------


def attention_one_by_one(a: nn.Attention, x: Tensor, rope: nn.attention.Rope | None) -> Tensor:
    B, S, _ = x.shape
    q, k, v = (
        t.view(B, S, -1, a.head_dim).transpose(1, 2)
        for t in a.qkv(x).split([n * a.head_dim for n in (a.n_heads, a.n_kv_heads, a.n_kv_heads)], -1)
    )
    q = q if a.q_norm is None else a.q_norm(q)
    k = k if a.k_norm is None else a.k_norm(k)
    if rope is not None:
        q, k = nn.apply_rope(q, rope), nn.apply_rope(k, rope)
    k, v = (t.repeat_interleave(a.n_heads // a.n_kv_heads, 1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=a.causal)
    return a.out(y.transpose(1, 2).flatten(2))


def no_norm(attention, name):
    setattr(attention, name, None)


def with_bias(attention, name):
    norm = nn.RMSNorm(8, bias=True)
    torch.nn.init.normal_(norm.bias)
    setattr(attention, name, norm)


def another_eps(attention, name):
    attention.get_submodule(name).eps = 0.5


def another_casting(attention, name):
    attention.get_submodule(name).casting = "gemma"
    attention.get_submodule(name).impl = None  # torch's own norm has no such casting


QK_WAYS = [
    adapt,
    identity,
    double_after,
    double_forward,
    parametrized,
    torchs_own,
    subclass,
    no_norm,
    with_bias,
    another_eps,
    another_casting,
]


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
@pytest.mark.parametrize("change", QK_WAYS)
def test_a_changed_qk_norm_has_its_effect(change, name, rotated, fused):
    a = nn.Attention(32, 4, 2, qk_norm=True, impl="torch")
    change(a, name)
    x = torch.randn(2, 5, 32)
    rope = nn.rope_tables(9, 8) if rotated else None
    want = attention_one_by_one(a, x, rope)
    wanted = gradients(want.square().sum(), a)
    got = a(x, rope)
    close(got, want)
    for mine, other in zip(gradients(got.square().sum(), a), wanted, strict=True):
        close(mine, other, 1e-4)
    assert fused["qk_norm_qkv"] == 0


def test_equal_qk_norms_are_fused(fused):
    a = nn.Attention(32, 4, 2, qk_norm=True, impl="reference")
    assert a.q_norm.impl == a.k_norm.impl == "reference"
    for norm in (a.q_norm, a.k_norm):
        norm.eps, norm.casting = 0.25, "llama"
    x = torch.randn(2, 5, 32)
    close(a(x), attention_one_by_one(a, x, None))
    assert fused["qk_norm_qkv"] == 1


# --- sharding -------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


SHARDED = [
    ["norm"],
    ["embedding"],
    ["positions"],
    ["head"],
    ["blocks.0.norm2", "blocks.1.norm1"],
    ["blocks.0", "blocks.1"],
    [],
    ["embedding", "positions", "blocks.0", "blocks.1", "norm", "head"],
]


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("names", SHARDED, ids=str)
@pytest.mark.parametrize("parts", [{}, UNTIED], ids=["tied", "untied"])
def test_fully_shard_of_single_modules(parts, names, batch, mesh):
    from torch.distributed.fsdp import fully_shard

    plain, model = gpt(**parts), gpt(**parts)
    wanted = dict(plain.named_parameters())
    modules = dict(model.named_modules())
    for name in names:
        if name in modules:  # a tied model has no head
            fully_shard(modules[name], mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    assert list(model.state_dict()) == list(plain.state_dict())
    for return_logits in (True, False):
        plain.zero_grad()
        model.zero_grad()
        want, got = (m(*batch, return_logits=return_logits)[1] for m in (plain, model))
        close(got, want)
        want.backward()
        got.backward()
        for name, p in model.named_parameters():
            close(p.grad.full_tensor(), wanted[name].grad)
    close(model(batch[0])[0], plain(batch[0])[0])


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("parts", [{}, UNTIED], ids=["tied", "untied"])
def test_tensor_parallel_tables_and_head(parts, batch, mesh):
    """Their classes stay; their weights are DTensors, and hooks convert inputs and outputs."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plain, model = gpt(**parts), gpt(**parts)
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    for return_logits in (True, False):
        want, got = (m(*batch, return_logits=return_logits)[1] for m in (plain, model))
        close(got, want)
        for a, b in zip(gradients(got, model), gradients(want, plain), strict=True):
            close(a.full_tensor() if hasattr(a, "full_tensor") else a, b)
