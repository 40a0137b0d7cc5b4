"""Several processes that train one model: examples/parallel.py and sharded.py against one process."""

from __future__ import annotations

# ruff: noqa: F401, F811  (fixtures are imported)
import contextlib
import copy
import dataclasses
import errno
import functools
import importlib
import os
import random
import re
import resource
import signal
import sys
import types
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
import torchrun
from example_scripts import BEST, CHECKPOINT, LOG, PLOT, SETTINGS, called, examples_path, rows, text
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashproto import distributed, masks, nn
from flashproto.backends import set_default

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without it")

WAYS = ["ddp", "fsdp"]
SIZES = [2, 4]
GPT2 = nn.GPTConfig(67, 16, 2, 2, 32)
LLAMA = nn.GPTConfig(
    67, 16, 2, 4, 32, n_kv_heads=2, norm="rms", mlp="swiglu", positions="rope", bias=False
)
UNTIED = dataclasses.replace(LLAMA, tie_weights=False, bias=True)
OSS = dataclasses.replace(LLAMA, window=5, window_pattern="SL", softcap=3.0, sinks=True)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "untied": UNTIED, "gpt-oss": OSS}
# Learned positions; rope, fewer key heads; the same with documents.
CONTEXT_CASES = [
    ("gpt2", "ddp", False),
    ("llama", "fsdp", False),
    ("gpt2", "fsdp", True),
    ("gpt-oss", "ddp", True),
]
ROWS = 8
RATE, LIMIT = 1e-2, 0.25  # of learning, and of the gradient's norm


def module(name: str) -> types.ModuleType:
    return importlib.import_module(name)


def world():
    """The World of a process of tests/processes.py."""
    return module("parallel").World(dist.get_rank(), dist.get_world_size())


def make_model(config: nn.GPTConfig, dtype: torch.dtype = torch.float64, impl: str = "torch") -> nn.GPT:
    torch.manual_seed(5)
    model = nn.GPT(config, impl="reference" if config.sinks else impl, dtype=dtype)
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(p)
    return model


def make_optimizer(model: nn.GPT) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, fused=True)


def make_batch(config: nn.GPTConfig, seed: int) -> Tensor:
    """The ids of a global batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (ROWS, config.context + 1), generator=generator)


def bound(x: Tensor) -> float:
    """Of what float64 rounds in sums of some thousand products, of which x is made."""
    return 1000 * torch.finfo(torch.float64).eps * max(1e-3, x.abs().max().item())


def close(got: Tensor, want: Tensor, what: str, most: float | None = None) -> None:
    most = bound(want) if most is None else most
    worst = (module("parallel").whole(got) - want).abs().max().item()
    assert worst <= most, f"{what}: {worst:.1e} more than {most:.1e}"


# --- losses, gradients and steps ------------------------------------------------------------------


def step(
    w, model, forward, optimizer, batches: list[Tensor], documents: bool = False
) -> tuple[float, Tensor]:
    """The gradient of several global batches, clipped; returns their loss and the norm before.

    documents: each begins with an id that 5 divides.
    """
    loss = torch.zeros((), dtype=torch.float64)
    for i, batch in enumerate(batches):
        mine = batch.chunk(w.data_size)[w.data_rank]
        x, y = w.tokens(mine[:, :-1], 0), w.tokens(mine[:, 1:], -100)
        with w.accumulating(forward, i == len(batches) - 1):
            ids = w.tokens((mine[:, :-1] % 5 == 0).cumsum(1), -1) if documents else None
            _, mean = forward(x, y, return_logits=False, group=w.group, documents=ids)
            (mean / len(batches)).backward()
        loss += mean.detach() / len(batches)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = [p.grad for p in parameters if p.grad is not None]
    mean, norm, stops = w.of_step(loss, found, stop=w.rank == w.size - 1)
    assert stops == 1
    torch.nn.utils.clip_grads_with_norm_(parameters, LIMIT, norm)
    return mean.item(), norm


def training_equals_one_process(
    name: str, way: str, batches: int, context: int = 1, documents: bool = False
) -> None:
    config, w = CONFIGS[name], world()
    w.share_sequences(context)
    # "torch" gives no lse, by which the parts of a sequence merge.
    alone = make_model(config, impl="torch" if context == 1 else "reference")
    model = copy.deepcopy(alone)
    module("parallel").AT_ONCE = 1 if name == "llama" else 10**9  # each block alone, or all at once
    wrapped = w.wrap(model, way)
    optimizers = make_optimizer(alone), make_optimizer(model)
    assert all(isinstance(p, DTensor) == (way == "fsdp") for p in model.parameters())
    with torch.no_grad():
        wrapped(make_batch(config, 9)[:1, :3])  # as a sample before the first step
    data = [make_batch(config, i) for i in range(batches)]
    want = step(module("parallel").ALONE, alone, alone, optimizers[0], data, documents)
    got = step(w, model, wrapped, optimizers[1], data, documents)
    assert want[1] > LIMIT  # so that there is something to clip
    close(torch.tensor(got[0]), torch.tensor(want[0]), "loss")
    close(got[1], want[1], "norm")
    for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        close(p.grad, q.grad, f"gradient of {key}")
    for optimizer in optimizers:
        optimizer.step()
    # AdamW's first step is rate * g / (|g| + eps): it multiplies what g is off by rate / eps at most.
    factor = RATE / optimizers[0].defaults["eps"]
    for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        close(p, q, key, 2 * factor * bound(q.grad))


def bfloat16_blocks_are_autocast(name: str) -> None:
    """Blocks in bfloat16 are as near to float64 as autocast is, and their gradients are float32."""
    w, config = world(), CONFIGS[name]
    exact = make_model(config)
    auto, model = (make_model(config, torch.float32) for _ in range(2))
    wrapped = w.wrap(model, "fsdp", bfloat16=True)
    data = [make_batch(config, 1)]
    one = module("parallel").ALONE
    loss, _ = step(one, exact, exact, make_optimizer(exact), data)
    losses = []
    for size, m, forward in ((one, auto, auto), (w, model, wrapped)):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(step(size, m, forward, make_optimizer(m), data)[0])
    assert abs(losses[1] - loss) <= 2 * abs(losses[0] - loss) + 1e-3
    for (key, p), q, r in zip(
        model.named_parameters(), auto.parameters(), exact.parameters(), strict=True
    ):
        assert p.grad.dtype == torch.float32, key
        far = (q.grad - r.grad).norm()
        assert (module("parallel").whole(p.grad) - r.grad).norm() <= 1.5 * far + 1e-3 * r.grad.norm(), (
            key
        )


# --- sequences that processes share ---------------------------------------------------------------


def layer_equals_the_whole(mask: masks.Mask | None = None, **options: object) -> None:
    """Attention as a layer on a group's shards, forward and backward, against that on all tokens."""
    w, S = world(), 16
    w.share_sequences(2)
    layer = nn.Attention(32, 4, 2, impl="reference", dtype=torch.float64, **options)
    rope = tuple(t.double() for t in nn.rope_tables(S, 8))
    x, dy = (torch.randn(2, S, 32, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    y = layer(x, rope, mask=mask)
    dx, *want = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    own = functools.partial(distributed.shard, dim=1, group=w.group)
    at = distributed.positions(S, w.group)
    mine = own(x.detach()).requires_grad_()
    got = layer(mine, (rope[0][at], rope[1][at]), w.group, mask=mask)
    close(got, own(y), "y")
    dmine, *parts = torch.autograd.grad(got, [mine, *layer.parameters()], own(dy))
    close(dmine, own(dx), "gradient of x")
    for (name, _), part, whole in zip(layer.named_parameters(), parts, want, strict=True):
        dist.all_reduce(part, group=w.group)
        close(part, whole, f"gradient of {name}")


def layer_with_options() -> None:
    """Masks are those of the whole sequence; gradients of sinks add up over the group."""
    options: dict = {"softcap": 1.0, "sinks": True}
    layer_equals_the_whole(window=(5, 0), **options)
    documents = masks.documents(torch.tensor([0] * 7 + [1] * 9))
    layer_equals_the_whole(documents, causal=False, window=(None, 4), **options)


def what_does_not_go_with_a_group() -> None:
    w, model = world(), make_model(GPT2, impl="reference")
    w.share_sequences(w.size)
    part = torch.zeros((1, 2 * GPT2.context // w.size), dtype=torch.int64)
    with pytest.raises(ValueError, match=f"tokens is 32 long in {w.size} shards; it takes at most"):
        model(part, group=w.group)
    with pytest.raises(ValueError, match="length"):
        model(part[:, :1], group=w.group)
    layer, x = nn.Attention(32, 4, impl="reference"), torch.zeros(1, 2, 32)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens is .* \[2\]; it takes None where group"):
        layer(x, None, w.group, cu_seqlens=cu)
    with pytest.raises(ValueError, match=r"cu_seqlens is .*; it takes None beside group"):
        model(part[:, :2], group=w.group, cu_seqlens=cu)
    layer.record_max_score = True
    with pytest.raises(ValueError, match="record_max_score is True; it takes False where group"):
        layer(x, None, w.group)
    with pytest.raises(ValueError, match="alibi is True; it takes False where group is given"):
        nn.Attention(32, 4, alibi=True)(x, None, w.group)


def validation_equals_one_process(text: Path, length: int) -> None:
    """Of `length` targets: of less than a window, whose end is filled up; and of a window that has none
    for one of the processes, in a batch of its own."""
    validation, parallel, w = module("validation"), module("parallel"), world()
    validation.SMALLEST_BATCH = 1
    set_default("reference")
    w.share_sequences(w.size)
    settings = module("settings").Settings(
        data=str(text), context=16, batch_size=1, device="cpu", dtype="float32"
    )
    corpus = module("text_data").Corpus.load(settings)
    part = corpus.validation[: length + 1]
    windows = module("text_data").Windows.of(length, settings.context, None)
    corpus = dataclasses.replace(
        corpus,
        validation=part,
        windows=windows,
        targets=windows.targets(),
        separator=int(part.mode().values),  # documents, of which there are several in a window
    )
    model = nn.GPT(dataclasses.replace(LLAMA, vocab_size=corpus.vocabulary.size), dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    want, got = (
        validation.validate(model, corpus, settings, world=each) for each in (parallel.ALONE, w)
    )
    whole = dataclasses.replace(corpus, separator=None)
    assert validation.validate(model, whole, settings) != pytest.approx(want, rel=1e-3)
    assert got == {name: pytest.approx(value, rel=1e-6) for name, value in want.items()}  # of float32


# --- checkpoints ----------------------------------------------------------------------------------

WINDOWED = ["--window", 5, "--window-pattern", "SL", "--sinks", "--impl", "reference"]
# Of 4 processes two hold no part of the sinks.
SAVED = nn.GPTConfig(67, 16, 2, 2, 32, norm="rms", positions="rope", window=5, sinks=True)


def trained() -> tuple[nn.GPT, torch.optim.Optimizer]:
    """After a step in one process."""
    model = make_model(SAVED)
    optimizer = make_optimizer(model)
    step(module("parallel").ALONE, model, model, optimizer, [make_batch(SAVED, 1)])
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(*parts) -> dict[str, Tensor]:
    return module("checkpoint").training_tensors(*parts)


def restored(way: str, source: Path) -> tuple:
    """(World, what is called, (model, optimizer)) with the state that `source` holds, a folder of
    several processes' or the file of one."""
    checkpoint, sharded, w = module("checkpoint"), module("sharded"), world()
    model = make_model(SAVED)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    wrapped = w.wrap(model, way)
    parts = model, make_optimizer(model)
    saved = sharded.find(source, w)
    assert saved.facts == {"step": 1}
    checkpoint.restore_training(saved.tensors(sharded.layout_of(*parts)), *parts)
    return w, wrapped, parts


def goes_on(way: str, source: Path, target: Path) -> None:
    """What is loaded is what was saved; saved again, it lies in `target`; a step on is the same."""
    w, wrapped, parts = restored(way, source)
    wanted = trained()
    for name, x in tensors_of(*parts).items():
        assert torch.equal(module("parallel").whole(x), tensors_of(*wanted)[name]), name
    if w.main:
        target.mkdir()
    w.gathered(None)
    for _ in range(2):  # the second save is beside the first
        module("sharded").save(target, tensors_of(*parts), {"step": 1}, w)
    data = [make_batch(SAVED, 2)]
    step(w, parts[0], wrapped, parts[1], data)
    step(module("parallel").ALONE, wanted[0], wanted[0], wanted[1], data)
    for optimizer in (parts[1], wanted[1]):
        optimizer.step()
    for (key, p), q in zip(parts[0].named_parameters(), wanted[0].parameters(), strict=True):
        close(p, q, key, 2 * RATE / 1e-8 * bound(q.grad))


def a_full_disk_in_one_process(source: Path, target: Path) -> None:
    """It is said by all which rank could not write, and the checkpoint before stays."""
    sharded, errors = module("sharded"), module("errors")
    w, _, parts = restored("fsdp", source)
    if w.main:
        target.mkdir()
    w.gathered(None)
    sharded.save(target, tensors_of(*parts), {"step": 1}, w)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    last = w.rank == w.size - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if last else soft, hard))
    try:
        with pytest.raises(errors.WriteError) as caught:
            sharded.save(target, tensors_of(*parts), {"step": 2}, w)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"could not be written (File too large) in rank {w.size - 1}" in str(caught.value)
    assert "what was saved before is whole. Make room, then go on" in str(caught.value)
    assert sharded.find(target, w).facts == {"step": 1}
    w.gathered(None)
    sharded.save(target, tensors_of(*parts), {"step": 2}, w)  # over what is left of the failed one
    w.gathered(None)
    assert sharded.find(target, w).facts == {"step": 2}


def one_decides_for_all() -> None:
    w = world()
    assert w.from_main(lambda: w.rank) == 0
    assert w.gathered(w.rank) == list(range(w.size))
    assert w.any(w.rank == w.size - 1)
    assert not w.any(None)
    assert w.agreed(f"rank {w.rank}" if w.rank else None) == "rank 1"
    assert w.agreed(None) is None
    assert w.largest([w.rank, -w.rank]) == [w.size - 1, 0]
    errors = module("errors")
    full = errors.WriteError(Path("x"), OSError(errno.ENOSPC, "No space left on device"))
    for error, code in ((errors.OptionError("no such option"), 2), (full, 1), (OSError(5, "gone"), 2)):
        with pytest.raises(errors.UserError) as caught:
            w.from_main(functools.partial(fail, error))
        assert (str(caught.value), caught.value.code) == (str(error), code)


def fail(error: Exception) -> None:
    raise error


def train(*arguments: object, impl: str = "torch", code: int = 0) -> None:
    """train_gpt.py in a process of tests/processes.py."""
    train_gpt, parallel = map(module, ("train_gpt", "parallel"))
    set_default(impl)
    train_gpt.Run.sample = lambda *_: None  # most of the time of so short a run
    rank, size = dist.get_rank(), dist.get_world_size()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        given = train_gpt.parse([str(a) for a in arguments], None)
        assert train_gpt.whole_run(given, parallel.World(rank, size, rank, size)) == code


def resumed_is_exact(way: str, folder: Path, options: list[object]) -> None:
    """A run that was stopped goes on as one that was not, bit for bit, in any number of processes."""
    options = [*options, "--parallel", way]
    train(*options, "--out", folder / "whole")
    train(*options, "--minutes", 1e-6, "--out", folder / "stopped")
    train("--resume", "--out", folder / "stopped")
    if world().main:
        assert rows(folder / "stopped") == rows(folder / "whole")


def stopped_validations_are_made_up_for(folder: Path, options: list[object]) -> None:
    """A signal to one process during a validation, behind the sum of its step, stops all of them at
    that step, the last one too."""
    script, arguments = module("train_gpt"), [*options, "--validate-every", 4]
    train(*arguments, "--out", folder / "whole")
    validate, last = script.validate, world().rank == world().size - 1

    def stopped(*given: object) -> dict | None:
        if last:
            signal.raise_signal(signal.SIGINT)
        return validate(*given)

    for step in (4, 8):
        script.validate = stopped
        train(*arguments, "--out", folder / "stopped", code=130 if last else 0)
        script.validate = validate
        if world().main:
            assert rows(folder / "stopped")[-1].keys() == rows(folder / "whole")[0].keys()
            assert rows(folder / "stopped")[-1]["step"] == step
        arguments = ["--resume"]
        if step == 4:  # a resumed run validates first, then trains
            train("--resume", "--out", folder / "stopped", "--minutes", 1e-6)
    train("--resume", "--out", folder / "stopped")
    if world().main:
        assert rows(folder / "stopped") == rows(folder / "whole")


def shared_sequences_are_exact(folder: Path, options: list[object]) -> None:
    """A run that was stopped goes on bit for bit, and to rounding where each process then has whole
    sequences, and its share of the model otherwise."""
    begin = functools.partial(train, *options, "--context-parallel", 2, impl="reference")
    begin("--out", folder / "whole")
    for name in ("stopped", "other"):
        begin("--minutes", 1e-6, "--out", folder / name)
    resume = functools.partial(train, "--resume", impl="reference")
    resume("--out", folder / "stopped")
    resume("--out", folder / "other", "--context-parallel", 1, "--parallel", "ddp")
    if world().main:
        whole = rows(folder / "whole")
        assert len(whole) == 3 and "validation" in whole[-1]
        assert rows(folder / "stopped") == whole
        for got, want in zip(rows(folder / "other"), whole, strict=True):
            assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_several_processes_train_as_one(tmp_path, text):
    """Of each number of processes all cases in one start; those of 4 load what 2 have written."""
    checkpoint, sharded = map(module, ("checkpoint", "sharded"))
    source, parts = tmp_path / "one.safetensors", trained()
    wanted = tensors_of(*parts)
    checkpoint.save(source, wanted, {"step": 1})
    for size in SIZES:
        cases = {"agreement": one_decides_for_all}
        for way in WAYS:
            for name in CONFIGS:
                cases[f"{name} {way}"] = functools.partial(training_equals_one_process, name, way, 3)
            cases[f"on with {way}"] = functools.partial(
                goes_on, way, source, tmp_path / f"{size} {way}"
            )
        for name, way, documents in CONTEXT_CASES:
            cases[f"{name} {way} context"] = functools.partial(
                training_equals_one_process, name, way, 2, context=2, documents=documents
            )
        if size == 2:
            cases["layer"] = layer_equals_the_whole
            cases["layer with options"] = layer_with_options
            cases["layer with QK norm"] = functools.partial(layer_equals_the_whole, qk_norm=True)
            for length in (13, 20):
                cases[f"validation of {length}"] = functools.partial(
                    validation_equals_one_process, text, length
                )
        cases["misfits of a group"] = what_does_not_go_with_a_group
        cases["bfloat16"] = functools.partial(bfloat16_blocks_are_autocast, "gpt2")
        cases["full disk"] = functools.partial(
            a_full_disk_in_one_process, source, tmp_path / f"{size} full"
        )
        if size == SIZES[-1]:
            options = ["--data", text, *torchrun.ROWS, *WINDOWED, "--steps", 8]
            for way in WAYS:
                at = tmp_path / f"exact {way}"
                cases[f"exact {way}"] = functools.partial(resumed_is_exact, way, at, options)
            cases["stopped validations"] = functools.partial(
                stopped_validations_are_made_up_for, tmp_path / "validations", options
            )
            # Steps so small that they do not make more of what float32 rounds.
            options = [*options[:-1], 3, "--learning-rate", 1e-4]
            cases["exact with shared sequences"] = functools.partial(
                shared_sequences_are_exact, tmp_path / "shared", [*options, "--parallel", "fsdp"]
            )
        processes.run(cases, size)
        source = tmp_path / f"{size} fsdp"
    for size in SIZES:
        for way in WAYS:
            saved = sharded.find(tmp_path / f"{size} {way}")
            assert saved.facts == {"step": 1}
            tensors = saved.tensors(sharded.whole_tensors)
            assert tensors.keys() == wanted.keys()
            for name, x in tensors.items():
                assert torch.equal(x, wanted[name]), (size, way, name)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_four_processes_goes_on_in_two_and_alone(tmp_path, text, way):
    """Its losses are those of four processes that were not stopped, within float32's rounding."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    # Steps so small that they do not make more of what float32 rounds.
    options = ["--data", text, *torchrun.ROWS, "--steps", 6, "--learning-rate", 1e-4]
    options += ["--parallel", way]
    one_step = "--minutes", 1e-6
    cases = {
        "whole": functools.partial(train, *options, "--out", whole),
        "stopped": functools.partial(train, *options, *one_step, "--out", folder),
    }
    processes.run(cases, 4)
    assert len(rows(folder)) == 1
    processes.run({"on": functools.partial(train, "--resume", *one_step, "--out", folder)}, 2)
    assert len(rows(folder)) == 2
    called("train_gpt", "--resume", "--out", folder, "--minutes", 10)
    got, want = rows(folder), rows(whole)
    assert [r["step"] for r in got] == list(range(1, 7))
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


# --- torchrun, and what goes wrong ----------------------------------------------------------------


def failure(*arguments: object, cwd: Path, largest_file: int | None = None) -> str:
    """The last lines of a torchrun that fails within a minute."""
    process = torchrun.start(2, *arguments, cwd=cwd, largest_file=largest_file)
    _, err = process.communicate(timeout=torchrun.MINUTE)
    assert process.returncode == 1, err
    return torchrun.last_lines(err)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of torchrun in /proc")
def test_a_run_in_two_processes_outlives_what_happens_to_it(tmp_path, text):
    folder, whole, alone = tmp_path / "run", tmp_path / "whole", tmp_path / "alone"
    # Steps so small that they do not make more of what float32 rounds.
    options = ["--data", text, *torchrun.ROWS, "--steps", 40, "--learning-rate", 1e-4]
    shared = [*options, "--parallel", "fsdp"]
    began = torchrun.start(2, *shared, "--out", folder, cwd=tmp_path)
    rank = random.randrange(2)
    assert torchrun.kill(began, folder, rank, random.uniform(0, 0.4), after="latest") is not None
    latest = (folder / "latest").read_bytes()

    said = failure("--resume", "--out", folder, cwd=tmp_path, largest_file=1 << 20)
    assert "could not be written (File too large) in rank" in said
    assert "what was saved before is whole. Make room, then go on with --resume." in said
    assert (folder / "latest").read_bytes() == latest

    shard = folder / latest.split()[0].decode() / "__1_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    said = failure("--resume", "--out", folder, cwd=tmp_path)
    assert "rank      : " in said
    assert f"{str(shard)!r} of a checkpoint does not have the content" in said
    assert "Use another copy, or start a new run." in said
    shard.write_bytes(content)

    cases = {
        "on": functools.partial(train, "--resume", "--out", folder),
        "whole": functools.partial(train, *shared, "--out", whole),
    }
    processes.run(cases, 2)
    assert rows(folder) == rows(whole)
    called("train_gpt", *options, "--out", alone)
    for many, one in zip(rows(whole), rows(alone), strict=True):
        assert many.keys() == one.keys()
        assert (many["step"], many["learning_rate"]) == (one["step"], one["learning_rate"])
    # The case in float64 is above.
    for many, one in zip(rows(whole)[:3], rows(alone)[:3], strict=True):
        assert many == pytest.approx(one, rel=1e-6)

    # One process goes on with what several wrote, and several with what one wrote.
    called("train_gpt", "--resume", "--out", folder, "--steps", 42)
    called("generate", "--run", folder, "--tokens", 3, "--device", "cpu")
    called("generate", "--run", whole, "--tokens", 3, "--device", "cpu")
    assert {p.name for p in folder.iterdir()} == {BEST, CHECKPOINT, LOG, PLOT, SETTINGS}


@pytest.mark.slow
def test_processes_of_another_launcher_end_when_one_is_killed(tmp_path, text):
    """Each that is left within a minute, in one line; and the run goes on in fewer processes."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    # Steps so small that they do not make more of what float32 rounds.
    options = ["--data", text, *torchrun.ROWS, "--steps", 20, "--learning-rate", 1e-4]
    often = [*options, "--save-every", 1]
    begun = torchrun.start_without(4, *often, "--out", folder, cwd=tmp_path)
    assert torchrun.written(begun[0], folder / "latest", 0)
    begun.pop(random.randrange(4)).kill()
    for process in begun:
        _, err = process.communicate(timeout=torchrun.MINUTE)
        assert process.returncode == 1, err
        assert re.fullmatch(r"train_gpt.py: rank \d: another process has ended, .*; go on .*\n", err)
    assert module("sharded").find(folder).facts["step"] < 20
    processes.run({"whole": functools.partial(train, *options, "--out", whole)}, 4)
    resume = "--resume", "--save-every", 6
    processes.run({"on": functools.partial(train, *resume, "--out", folder)}, 2)
    for got, want in zip(rows(folder), rows(whole), strict=True):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("start", [torchrun.start, torchrun.start_without])
def test_ctrl_c_stops_all_processes_after_the_same_step(tmp_path, monkeypatch, text, start):
    """The only traceback is torchrun's own; where another launcher starts them there is none."""
    monkeypatch.chdir(tmp_path)  # which the next command's path is relative to, there and here
    folder = tmp_path / "run"
    started = start(2, "--data", text, *torchrun.ROWS, "--steps", 100000, "--out", folder, cwd=tmp_path)
    begun = started if isinstance(started, list) else [started]
    assert torchrun.written(begun[0], folder / "latest", 0)
    assert torchrun.written(begun[0], folder / "latest", (folder / "latest").stat().st_mtime_ns)
    for process in begun:
        process.send_signal(signal.SIGINT)
    ended = [process.communicate(timeout=torchrun.MINUTE) for process in begun]
    step = module("sharded").find(folder).facts["step"]
    assert (
        f"stopped at step {step} (SIGINT) and saved; go on with: {module('errors').program('torchrun')}"
        in ended[0][0]
    )
    assert rows(folder)[-1]["step"] == step
    for process, (_, err) in zip(begun, ended, strict=True):
        assert process.returncode == (130 if begun is started else 1), err
        assert err.count("Traceback") == (begun is not started), err
        assert begun is started or "SignalException" in err.splitlines()[-1]


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with two checkpoints, written by a process alone."""
    for n in (1, 2):
        module("sharded").save_together(
            tmp_path, {"x": torch.arange(5) * n}, {"step": n}, module("parallel").ALONE
        )
    return tmp_path


def test_the_latest_is_read(saved):
    sharded = module("sharded")
    found = sharded.find(saved)
    assert found.facts == {"step": 2}
    assert found.tensors(sharded.whole_tensors)["x"].tolist() == [0, 2, 4, 6, 8]
    assert (saved / "latest").read_text().startswith("checkpoint-b ")


def test_a_checkpoint_that_is_written_anew_while_it_is_read_is_refused(saved):
    """That of a run that goes on, by --init-from; one save later it is whole still."""
    sharded, errors = module("sharded"), module("errors")
    found = sharded.find(saved)
    for n in (3, 4):
        sharded.save_together(saved, {"x": torch.arange(5) * n}, {"step": n}, module("parallel").ALONE)
        if n == 3:
            assert found.tensors(sharded.whole_tensors)["x"].tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(errors.CheckpointError, match=r"checkpoint-b' was written anew while it was re"):
        found.tensors(sharded.whole_tensors)
    assert sharded.find(saved).facts == {"step": 4}


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [shorten, alter, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "facts.json"])
def test_a_damaged_checkpoint_is_named(saved, name, damage):
    path = saved / "checkpoint-b" / name
    damage(path)
    with pytest.raises(module("errors").CheckpointError) as caught:
        module("sharded").find(saved)
    said = str(caught.value)
    assert str(saved / "latest" if name == "facts.json" else path) in said
    assert said.endswith("Use another copy, or start a new run.")


# --- options --------------------------------------------------------------------------------------


def test_options_that_do_not_fit_the_number_of_processes(monkeypatch):
    OptionError = module("errors").OptionError
    with pytest.raises(OptionError, match="--parallel is 'fsdp', and there is one process"):
        module("parallel").ALONE.check_several("fsdp")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    many = module("parallel").World(0, 2, 0, 2)
    many.check_device("cpu")
    with pytest.raises(OptionError, match="--nproc-per-node is 2, and torch sees 1"):
        many.check_device("cuda")
    settings = module("settings").Settings(batch_size=4)
    with pytest.raises(OptionError, match=r"multiple of 3\. Pass 6, or start another number of proc"):
        module("batches").Batches(torch.arange(200), settings, 0, 3)
    settings = dataclasses.replace(settings, context_parallel=2)
    with pytest.raises(OptionError, match=r"with --accumulate 1 and 3 groups of 2 processes it takes"):
        module("batches").Batches(torch.arange(200), settings, 0, 3)


def test_options_that_do_not_go_with_shared_sequences():
    OptionError, Settings = module("errors").OptionError, module("settings").Settings
    for size, n, fits in ((1, 2, 1), (6, 4, 2), (3, 2, 1)):
        with pytest.raises(OptionError, match=rf"processes is {size}; it takes .* Pass {fits}, or"):
            module("parallel").World(0, size).share_sequences(n)
    Settings(context=12, context_parallel=3).check_context_parallel()
    Settings(context=7, compile=True, log_max_score=True).check_context_parallel()
    with pytest.raises(OptionError, match=r"--context is 14; .* a multiple of 6\. Pass 18, or another"):
        Settings(context=14, context_parallel=3).check_context_parallel()
    for name in ("compile", "log_max_score"):
        settings = Settings(context=12, context_parallel=3, **{name: True})
        option = "--" + name.replace("_", "-")
        with pytest.raises(OptionError, match=f"is 3; with {option} it takes 1. Leave one of them out"):
            settings.check_context_parallel()


def test_the_command_that_goes_on_names_the_processes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py"])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    World = module("parallel").World
    assert World().command() == "python train_gpt.py --resume"
    here = World(1, 2, 1, 2, folder=Path("a b"))
    assert here.command() == "torchrun --nproc-per-node 2 train_gpt.py --resume --out 'a b'"
    assert World(1, 4, 1, 2).command() == "torchrun --nnodes 2 ... train_gpt.py --resume"


def test_a_program_that_the_shell_does_not_find_is_named_by_its_path(monkeypatch, tmp_path):
    program = module("errors").program
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder, name in ((tmp_path / ".venv" / "bin", ".venv/bin/"), (tmp_path.parent / "a b", None)):
        folder.mkdir(parents=True)
        (folder / "torchrun").touch()
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
        assert program("torchrun") == (f"{name}torchrun" if name else f"'{folder}/torchrun'")
    assert program("python") == "python"  # which is not there under that name
