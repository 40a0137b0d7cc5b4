"""Models made on the meta device and initialised afterwards are like those of the constructor."""

from __future__ import annotations

import copy
import dataclasses
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flashproto import nn
from flashproto.nn import GPTConfig

SMALL = GPTConfig(vocab_size=211, context=64, n_layers=3, n_heads=4, d_model=64)
PARTS = {
    "gpt": {},
    "gpt untied": {"tie_weights": False},
    "llama": {
        "norm": "rms",
        "mlp": "swiglu",
        "positions": "rope",
        "bias": False,
        "tie_weights": False,
    },
    "gpt-oss": {"positions": "rope", "window": 7, "window_pattern": "SL", "sinks": True},
}


def emptied(module: torch.nn.Module) -> torch.nn.Module:
    """After to_empty, with numbers that no initialisation gives."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            t.fill_(math.nan)
    return module


def whole(model: torch.nn.Module) -> None:
    model.reset_parameters()


def each(model: torch.nn.Module) -> None:
    """As FSDP and trainers do."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def each_that_owns(model: torch.nn.Module) -> None:
    """Modules with parameters or buffers of their own, leaves first."""
    for module in reversed(list(model.modules())):
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            module.reset_parameters()


def check_gpt2s(model: nn.GPT) -> None:
    into_stream = 0.02 / math.sqrt(2 * model.config.n_layers)
    for name, p in model.named_parameters():
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        if name.endswith(("bias", "sinks")):
            assert torch.equal(p, torch.zeros_like(p)), name
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            std = into_stream if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            few = 5 / math.sqrt(p.numel())  # five standard deviations, of the mean and of the std
            assert abs(p.mean().item()) < few * std, name
            assert p.std().item() == pytest.approx(std, rel=few), name
            assert p.abs().amax() < 6 * std, name


@pytest.mark.parametrize("initialise", [whole, each, each_that_owns])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_model_of_the_meta_device_is_initialised_as_any(parts, initialise):
    config = dataclasses.replace(SMALL, **parts)
    check_gpt2s(nn.GPT(config))
    with torch.device("meta"):
        model = nn.GPT(config, impl="reference")
    initialise(emptied(model))
    check_gpt2s(model)
    tokens, targets = torch.randint(211, (2, 2, 64))
    assert 0.9 * math.log(211) < model(tokens, targets)[1].item() < 1.1 * math.log(211)


def test_reset_parameters_draws_what_the_constructor_draws():
    """The numbers of a seed: those of the constructor come after what torch's layers draw first."""
    model, again = nn.GPT(SMALL), emptied(nn.GPT(SMALL, device="meta"))
    for m in (model, again):
        m.reset_parameters(torch.Generator().manual_seed(5))
    state = again.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    torch.manual_seed(5)
    whole(model)
    state = again.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_state_dict_is_all_that_a_model_holds(parts):
    """No table outside of it is left unmade by to_empty."""
    config = dataclasses.replace(SMALL, **parts)
    model = nn.GPT(config, impl="reference")
    copy = emptied(nn.GPT(config, impl="reference", device="meta"))
    copy.load_state_dict(model.state_dict())
    tokens = torch.randint(211, (2, 9))
    assert torch.equal(model(tokens)[0], copy(tokens)[0])


def test_modules_outside_a_gpt_keep_torchs_initialisation():
    block = nn.TransformerBlock(64, 4, norm="rms", device="meta")
    attention = nn.Attention(64, 4, qk_norm=True, sinks=True, alibi=True, device="meta")
    for module in (emptied(block), emptied(attention)):
        each(module)
        for name, p in module.named_parameters():
            if "norm" in name:
                assert torch.equal(p, torch.zeros_like(p) if "bias" in name else torch.ones_like(p))
            elif name == "sinks":
                assert torch.equal(p, torch.zeros_like(p))
            elif name.endswith("weight"):
                bound = 1 / math.sqrt(p.shape[1])
                assert 0.95 * bound < p.abs().amax() <= bound
                assert p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
            else:
                assert 0 < p.abs().amax() <= 1 / math.sqrt(module.get_submodule(name[:-5]).in_features)


@pytest.mark.parametrize("casting", ["torch", "gemma"])
@pytest.mark.parametrize(
    "make", [nn.LayerNorm, nn.RMSNorm, lambda n, **o: nn.RMSNorm(n, bias=True, **o)]
)
def test_norms_initialise_themselves(make, casting):
    norm, want = emptied(make(8, casting=casting, device="meta")), make(8, casting=casting)
    norm.reset_parameters()
    for name, p in want.named_parameters():
        assert torch.equal(norm.get_parameter(name), p)


def test_what_was_put_in_later_initialises_itself():
    model = nn.GPT(SMALL)
    model.norm = torch.nn.LayerNorm(64)
    model.head = torch.nn.Linear(64, 211)
    torch.nn.init.constant_(model.norm.weight, 7.0)
    torch.nn.init.constant_(model.head.weight, 7.0)
    model.reset_parameters()
    assert torch.equal(model.norm.weight, torch.ones(64))
    assert 0 < model.head.weight.abs().amax() <= 1 / 8


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("initialise", [whole, each, each_that_owns])
def test_a_sharded_model_of_the_meta_device(initialise):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        config = dataclasses.replace(SMALL, tie_weights=False, sinks=True)
        model = nn.GPT(config, impl="reference", device="meta")
        for module in (*model.blocks, model.embedding, model.head):
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        initialise(emptied(model))
        check_gpt2s(model)
        tokens = torch.randint(211, (2, 9))
        loss = model(tokens, tokens, return_logits=False)[1]
        loss.backward()
        gradients: list[Tensor] = [p.grad.full_tensor() for p in model.parameters()]
        assert all(g.isfinite().all() for g in gradients)
    finally:
        dist.destroy_process_group()


def test_copies_and_pickles_know_how_they_are_initialised():
    model, file = nn.GPT(SMALL), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        each(emptied(other))
        check_gpt2s(other)
