"""Rollouts that share prefixes, packed so that each shared token is computed once.

    from flashproto.integrations import trees

    packed = trees.pack(rollouts)  # lists of token ids
    logits, _ = model(packed.tokens[None], mask=packed.mask, positions=packed.positions)
    logprobs = packed.by_rollout(packed.logprobs(logits))  # [R, L], for any loss

Legend: R rollouts, L tokens of the longest, T rows: the tokens of the tree, and padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import masks
from ..checks.errors import described, refuse, refuse_shape
from ..checks.options import check_integer
from ..checks.tensors import check_tensor
from ..functional import cross_entropy

NONE = -100  # cross_entropy's ignore_index


@dataclass(frozen=True, eq=False, repr=False)
class PackedTree:
    """Rollouts as trees in one row, made by pack.  The row of a token is that of every rollout that
    begins with the tokens up to it.  Nothing predicts a root's token, the first one of a rollout.

    Attributes:
        tokens: [T] int64, depth first; 0 in padding.
        positions: [T] int64, the place of each token in its rollouts.
        parents: [T] int64, the row of the token before; -1 of roots and padding.
        targets: [T] int64, what the logits of the parent predict: the token; -100 of roots and padding.
        paths: [R, L] int64, the row of each rollout's tokens; -1 behind its end.
        lengths: [R] int64, of the rollouts.
        mask: causal() & tree(parents): a token sees itself and those before it in its rollouts.
        used: rows that are not padding.
        saved: tokens of the rollouts less those rows.

    Loss: the loss of a token belongs to the token, not to the row that predicts it, since a row with
    several tokens behind it predicts each.  logprobs has them in the tokens' rows, and by_rollout hands
    each to the rollouts that have it, where a gradient is summed over them.
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor
    targets: Tensor
    paths: Tensor
    lengths: Tensor
    mask: masks.Mask
    used: int
    saved: int

    def __repr__(self) -> str:
        n = self.used + self.saved
        share = f"{self.saved} saved, {self.saved / max(n, 1):.1%}"
        return f"PackedTree({self.paths.shape[0]} rollouts, {n} tokens in {self.used} rows: {share})"

    def logprobs(self, logits: Tensor) -> Tensor:
        """The log probability of each row's token, given those before it: [T].

        Args:
            logits: [T, V] or [1, T, V], of the model's call, any floating dtype.

        Returns: float32 (float64 of such logits), 0 for roots and padding; differentiable.
        Raises: TypeError, ValueError: no such logits.

        Where hidden states h [T, C] are at hand, this is the same, and the logits are never in memory
        together: -linear_cross_entropy(h[parents], weight, targets, reduction="none").
        """
        logits = self._rows("PackedTree.logprobs", "logits", logits, 2)
        check_tensor("PackedTree.logprobs", "logits", logits)
        # logsumexp would round it to the logits' dtype.
        _, lse = cross_entropy(logits, self.tokens, reduction="none", return_lse=True)
        found = logits[self.parents, self.tokens].to(lse.dtype) - lse[self.parents]
        return found.masked_fill(self.parents < 0, 0.0)

    def by_rollout(self, x: Tensor) -> Tensor:
        """What rows hold, for each token of each rollout: x [T, ...] or [1, T, ...] to [R, L, ...].

        0 behind the end of a rollout.  The gradient of a row is the sum over the rollouts that have it.
        Raises: TypeError, ValueError: no such tensor.

        Example:
            >>> packed = trees.pack([[5, 6, 7], [5, 6], [5, 8]])
            >>> packed.by_rollout(packed.tokens)
            tensor([[5, 6, 7],
                    [5, 6, 0],
                    [5, 8, 0]])
        """
        x = self._rows("PackedTree.by_rollout", "x", x, 1)
        return torch.cat((x, x.new_zeros(1, *x.shape[1:])))[self.paths]

    def by_token(self, x: Tensor) -> Tensor:
        """The sum over the rollouts that have a token, in its row: x [R, L, ...] to [T, ...], the
        transpose of by_rollout.

        What weighs a token's loss in each rollout (an advantage; 0 in the prompt) becomes one weight:
        (w * by_rollout(logprobs)).sum() is (by_token(w) * logprobs).sum().  What is behind the end
        of a rollout is left out.
        Raises: TypeError, ValueError: no such tensor.

        Example:
            >>> packed = trees.pack([[5, 6, 7], [5, 6], [5, 8]])
            >>> packed.tokens, packed.by_token(torch.ones(3, 3))
            (tensor([5, 6, 7, 8]), tensor([3., 2., 1., 1.]))
        """
        name, (R, L) = "PackedTree.by_token", self.paths.shape
        if not isinstance(x, Tensor):
            refuse(name, "x", described(x), f"a tensor [{R}, {L}, ...]", "Pass a tensor.", TypeError)
        if x.shape[:2] != (R, L):
            takes = f"[{R}, {L}, ...], of the rollouts and the longest one's tokens"
            refuse_shape(name, "x", x, takes, "Pad it at the ends of rollouts.")
        made = x.new_zeros(self.tokens.shape[0] + 1, *x.shape[2:])
        return made.index_put((self.paths,), x, accumulate=True)[:-1]  # row -1 is the last one

    def _rows(self, name: str, argument: str, x: Any, least: int) -> Tensor:
        """x [T, ...] of [T, ...] or [1, T, ...], of at least `least` dimensions."""
        T = self.tokens.shape[0]
        shapes = f"[{T}{', V' if least == 2 else ', ...'}], or that behind a batch dimension of 1"
        if not isinstance(x, Tensor):
            refuse(name, argument, described(x), f"a tensor {shapes}", "Pass a tensor.", TypeError)
        if x.ndim > least and x.shape[:2] == (1, T):
            return x[0]
        if x.ndim < least or x.shape[0] != T or (least == 2 and x.ndim > 2):
            refuse_shape(name, argument, x, shapes, "Pass what the model gives of packed.tokens[None].")
        return x


def pack(
    sequences: Iterable[Sequence[int] | Tensor],
    *,
    pad_to: int | None = None,
    device: torch.device | str | None = None,
) -> PackedTree:
    """Pack rollouts as trees of their prefixes, side by side in one row.

    A prefix that several rollouts have is there once, whether it is a prompt, earlier turns or a whole
    rollout.  Rollouts that share nothing are trees of their own.  For several rows, call it for each
    group of rollouts.

    Windows and ALiBi count rows, not places in a rollout: a model that has them computes something else
    of a tree.  nn.GPT refuses windows beside positions.

    Args:
        sequences: the token ids of each rollout: lists, or integer tensors [length], of any lengths.
        pad_to: T, at least as many as there are tokens; None for as many.  Padding is at the end
            and sees itself alone.
        device: of the result; None is the CPU, or that of the first sequence if it is a tensor.

    Returns: a PackedTree.  Its rows are sorted by the ids of their rollouts.
    Raises: TypeError, ValueError: an argument does not fit.

    Example:
        >>> packed = trees.pack([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3]])
        >>> packed
        PackedTree(3 rollouts, 10 tokens in 5 rows: 5 saved, 50.0%)
        >>> packed.tokens, packed.positions, packed.parents
        (tensor([1, 2, 3, 4, 5]), tensor([0, 1, 2, 2, 3]), tensor([-1,  0,  1,  1,  3]))
        >>> packed.paths
        tensor([[ 0,  1,  2, -1],
                [ 0,  1,  3,  4],
                [ 0,  1,  2, -1]])
    """
    if not isinstance(sequences, Iterable):
        takes, do = "an iterable of rollouts", "Pass a list for each rollout."
        refuse("pack", "sequences", described(sequences), takes, do, TypeError)
    given = list(sequences)
    if device is None and given and isinstance(given[0], Tensor):
        device = given[0].device
    rollouts = [ids_of(x, f"sequences[{r}]") for r, x in enumerate(given)]
    lists = [x.tolist() for x in rollouts]
    # In this order a rollout shares most with the one before it, and the tree is walked depth first.
    order = sorted(range(len(lists)), key=lists.__getitem__)
    paths, used = list(rollouts), 0
    path = before = torch.zeros(0, dtype=torch.int64)
    tokens, positions, parents = [before], [before], [before]
    for r in order:
        ids, n = rollouts[r], shared(before, rollouts[r])
        path = torch.cat((path[:n], torch.arange(used, used + len(ids) - n)))
        tokens.append(ids[n:])
        positions.append(torch.arange(n, len(ids)))
        parents.append(F.pad(path, (1, 0), value=-1)[n:-1])
        paths[r], before, used = path, ids, used + len(ids) - n
    T = used
    if pad_to is not None:
        takes, do = f"at least the {used} tokens there are", "Leave it out, or pack fewer rollouts."
        T = check_integer("pack", "pad_to", pad_to, used, masks.LONGEST, takes, do)
    row, at, above = (torch.cat(x) for x in (tokens, positions, parents))
    row, at = (F.pad(x, (0, T - used)).to(device) for x in (row, at))
    above = F.pad(above, (0, T - used), value=-1).to(device)
    lengths = torch.tensor([len(x) for x in rollouts], dtype=torch.int64)
    L = max(map(len, rollouts), default=0)
    ends = [F.pad(x, (0, L - len(x)), value=-1) for x in paths]
    return PackedTree(
        tokens=row,
        positions=at,
        parents=above,
        targets=row.where(above >= 0, NONE),
        paths=(torch.stack(ends) if ends else lengths.view(0, 0)).to(device),
        lengths=lengths.to(device),
        mask=masks.causal() & masks.tree(above),
        used=used,
        saved=int(lengths.sum()) - used,
    )


def ids_of(x: Any, argument: str) -> Tensor:
    """A rollout as int64 [length] on the CPU."""
    try:
        ids = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    empty = ids is not None and ids.shape == (0,)  # a list of none is of floats
    whole = ids is not None and not (ids.is_floating_point() or ids.is_complex())
    if ids is None or ids.ndim != 1 or not (empty or (whole and ids.dtype != torch.bool)):
        got = f"of dtype {x.dtype}, {described(x)}" if isinstance(x, Tensor) else described(x)
        takes, do = (
            "a list of token ids, or an integer tensor [length]",
            "Pass a list for each rollout.",
        )
        refuse("pack", argument, got, takes, do, TypeError)
    return ids.to("cpu", torch.int64)


def shared(a: Tensor, b: Tensor) -> int:
    """How many tokens a and b begin with that are the same."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0, 0]) if len(different) else n


__all__ = ["PackedTree", "pack"]
