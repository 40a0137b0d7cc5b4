"""Several processes that train one model together, each on a GPU or a part of the CPU of its own.

torchrun starts them and says in the environment which one each is:

    torchrun --nproc-per-node 2 examples/train_gpt.py --parallel fsdp

Every process runs the whole script.  `World` is what it knows of the others: each takes its rows of the
same global batch, with --context-parallel its tokens of some rows.  Gradients are averaged over all of
them, and the first one (rank 0) alone prints and writes the log.  In one process everything here does
nothing, so that the script has one path.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from errors import EXPECTED, OptionError, TrainingError, UserError, program, tell
from stop import StopSignal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from flashproto import distributed
from flashproto.nn import GPT

T = TypeVar("T")
TIMEOUT = timedelta(seconds=50)  # the longest that a process waits for the others
PATIENCE = 5.0  # seconds in which torchrun notices that another process has ended, and ends this one

# The most parameters of blocks that `fully_shard` puts together at once.  Each time takes the host as
# long, however few they are, and makes all processes wait for the slowest.
AT_ONCE = 100_000_000


@dataclass
class World:
    """The processes that train together, and which of them this is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine, and the number of its GPU
    local_size: int = 1
    context: int = 1  # processes that share each sequence, one rank after the other
    group: dist.ProcessGroup | None = None  # those, where they are several
    folder: Path | None = None  # of the run, for what is said when it fails
    stop: StopSignal | None = None
    began: float = 0.0  # the same in every process
    parent: int = field(default_factory=os.getppid)

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes the log."""
        return self.rank == 0

    # --- the sequences --------------------------------------------------------------------------

    def share_sequences(self, context: int) -> None:
        """From now on so many processes share each sequence; OptionError where their number does not
        fit.  All processes call it."""
        if self.size % context:
            raise OptionError(
                f"--context-parallel is {context}, and the number of processes is {self.size}; it "
                f"takes a divisor of that. Pass {math.gcd(context, self.size)}, or start others: "
                f"torchrun --nproc-per-node {context} {sys.argv[0]} ..."
            )
        self.context = context
        if context > 1:
            self.group, _ = dist.new_subgroups(context, timeout=TIMEOUT)

    @property
    def data_rank(self) -> int:
        """Which sequences are this process's: the number of its part of them."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        """In how many parts the sequences are dealt out."""
        return self.size // self.context

    def tokens(self, x: Tensor, fill: int) -> Tensor:
        """This process's tokens of sequences [B, S].  Behind their end is `fill` where their length
        does not divide: under a causal mask the tokens before see nothing of it."""
        if self.group is None:
            return x
        missing = -x.shape[1] % (2 * self.context)
        return distributed.shard(pad(x, (0, missing), value=fill), 1, self.group)

    # --- what the processes agree on ------------------------------------------------------------

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns in the main process, in all of them; an error for the person at the
        command line is raised in all of them too."""
        if self.size == 1:
            return make()
        made: list = [None, None]
        try:
            made[0] = make() if self.main else None
        except EXPECTED as error:
            kind = TrainingError if getattr(error, "code", 2) == 1 else UserError
            made[1] = kind(str(error))  # of its text alone, as pickle makes it again
        dist.broadcast_object_list(made)
        if made[1] is None:
            return made[0]
        with contextlib.suppress(RuntimeError):  # who has it may have ended
            self.gathered(None)  # no one ends before all have it
        raise made[1]

    def gathered(self, value: T) -> list[T]:
        """The `value` of every process, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """values + those of the other processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    @torch.no_grad()  # a part of a DTensor then is no operation of autograd
    def of_step(self, loss: Tensor, gradients: list[Tensor], stop: bool) -> Tensor:
        """[mean of the processes' losses, norm of all gradients, in how many processes `stop` is true],
        by one sum, as a sum waits for the slowest process.  Of gradients in parts squares are summed.
        """
        norm = torch.nn.utils.get_total_norm([local(x) for x in gradients])
        found = torch.stack((loss, norm, torch.full_like(norm, stop)))
        if self.size > 1:
            parts = any(isinstance(x, DTensor) for x in gradients)
            found[0] /= self.size
            found[1] = norm.square() if parts else norm / self.size
            dist.all_reduce(found)
            if parts:
                found[1] = found[1].sqrt()
        return found

    def largest(self, values: list[float]) -> list[float]:
        """The largest of the processes' first values, of their second ones, and so on."""
        return [max(each) for each in zip(*self.gathered(values), strict=True)]

    def any(self, flag: object) -> bool:
        """Whether `flag` is true in any process."""
        if self.size == 1:
            return bool(flag)
        return bool(self.sum(torch.tensor([float(bool(flag))])).item())

    def left_alone(self) -> str | None:
        """The reason to stop that torchrun was killed: the run may be started again, and two would
        write to the same folder."""
        killed = self.size > 1 and os.getppid() != self.parent
        return "the process that started this one has ended" if killed else None

    def agreed(self, reason: str | None) -> str | None:
        """A reason to stop that one of the processes has; None where none has any: so all of them stop
        at the same step, and no one waits for a barrier."""
        return next(filter(None, self.gathered(reason))) if self.any(reason) else None

    # --- the model ----------------------------------------------------------------------------

    def check_several(self, way: str) -> None:
        """Raise OptionError where there is one process, and no way to share a model."""
        if self.size == 1:
            raise OptionError(
                f"--parallel is {way!r}, and there is one process; it takes several. Leave it out, or "
                f"start them: torchrun --nproc-per-node 2 {sys.argv[0]} ..."
            )

    def check_device(self, device: str) -> None:
        """Raise OptionError where there are fewer GPUs than processes."""
        if device == "cuda" and self.local_size > torch.cuda.device_count():
            raise OptionError(
                f"--nproc-per-node is {self.local_size}, and torch sees {torch.cuda.device_count()} "
                "GPUs; it takes at most one process for each. Start fewer, or pass --device cpu."
            )

    def wrap(self, model: GPT, way: str, *, compile: bool = False, bfloat16: bool = False) -> nn.Module:
        """The module to call in place of `model`, whose gradients are then those of all processes.

        way: "ddp": every process holds the model, and gradients are averaged while the backward goes
        on.  "fsdp": every process holds a part of each parameter, of its gradient and of its optimizer
        state; blocks are put together just before they run, small ones several at once.
        bfloat16: for fsdp, blocks travel and compute in bfloat16; parameters, gradients and the sum of
        the blocks' outputs stay float32, as under autocast.
        """
        if self.size == 1:
            return torch.compile(model) if compile else model  # type: ignore[return-value]
        device = next(model.parameters()).device
        if way == "ddp":
            wrapped = DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
            )
            return torch.compile(wrapped) if compile else wrapped  # type: ignore[return-value]
        # Blocks return a pair of tensors, and nothing here changes one in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        everyone = dist.group.WORLD
        assert everyone is not None
        mesh = DeviceMesh.from_group(everyone, device.type)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bfloat16 else None,
            reduce_dtype=torch.float32 if bfloat16 else None,
            cast_forward_inputs=False,
        )
        if compile:
            for block in model.blocks:
                block.compile()
        for blocks in at_once(model.blocks):
            fully_shard(blocks, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)  # the rest: the embeddings, the last norm and the head
        return model

    def settle(self, wrapped: nn.Module, autocast: torch.autocast) -> None:
        """To be called before the first step.  The first backward decides in which order DDP adds up
        the gradients of later ones: were it that of a step, a resumed run would round otherwise than
        one that was never stopped."""
        inner = without_compile(wrapped)
        if isinstance(inner, DistributedDataParallel):
            token = torch.zeros((1, 1), dtype=torch.int64, device=next(inner.parameters()).device)
            with autocast:
                _, loss = inner(token, token, return_logits=False)
            loss.backward()
            inner.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def accumulating(self, wrapped: Callable, last: bool) -> Iterator[None]:
        """Forward and backward of one of several batches whose gradients are added up.

        With DDP they are averaged over the processes in the last one alone.  With FSDP that is done in
        each, so that no process ever holds the gradient of the whole model.
        """
        inner = without_compile(wrapped)
        if isinstance(inner, DistributedDataParallel) and not last:
            with inner.no_sync():
                yield
        else:
            yield

    # --- the end --------------------------------------------------------------------------------

    def command(self) -> str:
        """The command that goes on with the run."""
        script = program("python" if self.size == 1 else "torchrun")
        if self.size != self.local_size:
            script += f" --nnodes {self.size // self.local_size} ..."
        elif self.size > 1:
            script += f" --nproc-per-node {self.local_size}"
        out = f" --out {shlex.quote(str(self.folder))}" if self.folder else ""
        return f"{script} {sys.argv[0]} --resume{out}"

    def note(self, text: str) -> None:
        """Leave a text for the last lines of torchrun, which it prints where this process fails.

        The time beside it is when the run began, in every process: torchrun then takes the process
        that it saw end first as the cause, and not one that it ended itself.
        """
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and self.size > 1:
            extra = {"py_callstack": f"rank {self.rank}: {text}", "timestamp": str(int(self.began))}
            content = {"message": {"message": text, "extraInfo": extra}}
            with contextlib.suppress(OSError):  # a full disk must not hide what the text tells
                Path(path).write_text(json.dumps(content))

    def note_silent_end(self) -> None:
        """What torchrun is to print where this process ends without a word of its own."""
        self.note(
            "ended without a word: it was killed (kill -9, or for want of memory) or crashed. "
            f"The last checkpoint is whole; go on with: {self.command()}"
        )

    def begin(self, folder: Path) -> None:
        """From now on failures are said to be of the run in `folder`."""
        self.folder = folder
        self.note_silent_end()

    def _fail(self, error: Exception) -> None:
        """End the process, at once: to leave the group in order would be to wait for the others."""
        if isinstance(error, EXPECTED):
            self.note(str(error))
            code = tell(f"{Path(sys.argv[0]).name}: rank {self.rank}", error)
        else:
            # Where another process has failed, what is seen here is a lost connection, and torchrun
            # asks this process to end: mostly it has done so, or it does so soon.
            first = str(error).partition("\n")[0].partition(" This is typically")[0]
            self.note(f"{type(error).__name__}: {first} Go on with: {self.command()}")
            code = 1
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            if not self.stop:
                time.sleep(PATIENCE)
                if is_lost_connection(error):
                    said = (
                        "another process has ended, or has not answered for "
                        f"{TIMEOUT.seconds} seconds ({first}); go on with: {self.command()}"
                    )
                    print(f"{Path(sys.argv[0]).name}: rank {self.rank}: {said}", file=sys.stderr)
                else:
                    traceback.print_exc()
                    said = f"{traceback.format_exc()}Go on with: {self.command()}"
                self.note(said)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


ALONE = World()


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """The World that torchrun describes, or that of one process.

    Standard output of every process but the main one is closed.  An error ends the process here: its
    text comes last in what torchrun prints.
    """
    read = {name: int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if read["WORLD_SIZE"] == 1:
        yield World()
        return
    world = World(
        int(os.environ["RANK"]),
        read["WORLD_SIZE"],
        int(os.environ["LOCAL_RANK"]),
        read["LOCAL_WORLD_SIZE"],
    )
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if world.local_rank < gpus:
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=TIMEOUT)
    world.began = world.from_main(time.time)
    world.note_silent_end()
    with open(os.devnull, "w") as nowhere:
        quiet = contextlib.nullcontext() if world.main else contextlib.redirect_stdout(nowhere)
        try:
            with quiet:
                yield world
        except Exception as error:
            world._fail(error)
        else:
            dist.destroy_process_group()


def is_lost_connection(error: Exception) -> bool:
    """Whether an error tells of another process, not of this one; gloo's have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def at_once(blocks: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Neighbours together, up to AT_ONCE parameters; larger blocks alone."""
    found: list[nn.Module] = []
    count = 0
    for block in blocks:
        more = sum(p.numel() for p in block.parameters())
        if found and count + more > AT_ONCE:
            yield found
            found, count = [], 0
        found.append(block)
        count += more
    if found:
        yield found


def without_compile(wrapped: Callable) -> Callable:
    """The module that torch.compile was given, where it was."""
    return getattr(wrapped, "_orig_mod", wrapped)


def local(x: Tensor) -> Tensor:
    """x, or this process's part of it where it is sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """x, put together where it is sharded: all processes call this together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def laid_out_as(x: Tensor, other: Tensor | None) -> Tensor:
    """x, or this process's part of it where `other` is sharded."""
    if isinstance(other, DTensor) and not isinstance(x, DTensor):
        return distribute_tensor(
            x.to(other.device), other.device_mesh, other.placements, src_data_rank=None
        )
    return x
