"""GPT: a decoder-only Transformer language model, GPT-2-like or Llama-like by its configuration.

Legend: B batch, S tokens, C = d_model, V vocabulary; tokens [B, S] int64, logits [B, S, V].
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import masks
from ..backends import autocast_dtype
from ..checks.errors import described, matches, refuse, refuse_shape
from ..checks.options import check_flag, check_integer, is_integer
from ..checks.reading import is_readable
from ..functional import cross_entropy, linear_cross_entropy
from . import pretrained
from .attention import (
    beside_attention,
    check_cu_seqlens,
    positions_of,
    rope_tables_at,
)
from .block import TransformerBlock
from .generation import generated
from .gpt_config import PRESETS, SHORT_NAMES, GPTConfig
from .kv_cache import KVCache
from .layers import Embedding, Linear, given, is_as_made, is_plain
from .norm import make_norm, norm_before_linear
from .sampling import Sampling, seeds_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tokens = TypeVar("Tokens", Tensor, "list[Tensor]")


class GPT(nn.Module):
    """Token embedding, n_layers pre-norm blocks, a final norm, and logits over the vocabulary.

    The residual stream passes between blocks as a pair whose sum the next norm takes (see
    TransformerBlock).  With tie_weights the embedding is also the output matrix, and state_dict
    holds it once.  impl is the backend by name, see TransformerBlock; None chooses; device and dtype
    are those of the parameters.

    Adapters, hooks, parametrizations and sharding of single modules work as in any torch model.  A
    module that they change is called and takes no part in a fusion.  For a norm that costs a pass over
    memory for the residual add.  For the head it costs the memory of the logits [B, S, V], which
    return_logits=False avoids otherwise.  With tie_weights the output matrix is what the embedding
    gives for all V ids: its weight, or, where an adapter, a parametrization or sharding changes that,
    the result of a second call.  Hooks of the embedding alone cause no second call.

    Example:
        >>> model = nn.GPT(nn.GPTConfig.preset("toy", n_layers=1, d_model=32, context=16))
        >>> tokens = torch.randint(256, (2, 8))
        >>> logits, loss = model(tokens, targets=tokens)
        >>> logits.shape, loss.shape
        (torch.Size([2, 8, 256]), torch.Size([]))
        >>> model.generate(tokens, 2, temperature=0).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, GPTConfig):
            name = config if isinstance(config, str) and config in (*PRESETS, *SHORT_NAMES) else "toy"
            do = f"Pass nn.GPTConfig.preset({name!r}), say."
            refuse("GPT", "config", described(config), "an nn.GPTConfig", do, TypeError)
        self.config = c = config
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = Embedding(c.vocab_size, c.d_model, **place)
        learned = c.positions == "learned"
        self.positions = Embedding(c.context, c.d_model, **place) if learned else None
        self.blocks = nn.ModuleList(
            TransformerBlock(
                c.d_model,
                c.n_heads,
                c.kv_heads,
                c.hidden,
                head_dim=c.d_head,
                norm=c.norm,
                mlp=c.mlp,
                bias=c.bias,
                window=None if window is None else (window, 0),
                softcap=c.softcap,
                sinks=c.sinks,
                dropout=c.dropout,
                eps=c.norm_eps,
                impl=impl,
                **place,
            )
            for window in c.windows
        )
        self.impl = beside_attention(impl)
        self.norm = make_norm(c.norm, c.d_model, bias=c.bias, eps=c.norm_eps, impl=self.impl, **place)
        self.head = None if c.tie_weights else Linear(c.d_model, c.vocab_size, bias=False, **place)
        for name, module in self.named_modules():
            if isinstance(module, (Linear, Embedding)):
                into_stream = name.endswith(("attention.out", "mlp.down"))
                module.std = 0.02 * ((2 * c.n_layers) ** -0.5 if into_stream else 1.0)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise every module; that of a module alone is its own reset_parameters.

        As GPT-2: weights of Linear and Embedding from normal(0, 0.02), those of projections into the
        residual stream divided by sqrt(2 n_layers), so that its variance does not grow with depth;
        biases and sinks 0; norms 1.  Modules that were put in later initialise themselves.
        """
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if isinstance(module, (Linear, Embedding)):
                module.reset_parameters(generator)
            elif reset is not None and module is not self:
                reset()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        return_logits: bool | Literal["last"] = True,
        group: ProcessGroup | None = None,
        mask: masks.Mask | None = None,
        cu_seqlens: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """tokens [B, S], int64 or int32, to (logits [B, S, V], loss).

        loss is the mean cross entropy of targets [B, S] in nats (float32), over those that are not
        -100; None without targets.  return_logits=False with targets gives (None, loss), and on a GPU
        the logits are never in memory together (see flashproto.linear_cross_entropy).
        return_logits="last" gives those of each sequence's last token, [B, V].  Raises
        ValueError for tokens that are not [B, S] integers or longer than the context, and on a CPU
        for ids out of range; to look at them on a GPU would mean to wait for it.  Targets are checked
        as by flashproto.cross_entropy.

        group: the ranks that share each sequence.  tokens and targets are then what
        flashproto.distributed.shard leaves to this one, logits and loss are of these, and attention is
        ring_attention.  All ranks make the same calls, forward and backward.  The gradients are those
        of the sum of all ranks' losses: averaged over all ranks, as data parallelism does, they are
        those of the mean over all tokens, where all have as many targets.

        - mask: a value of flashproto.masks, beside the causal mask and the windows; with a group, of
          the whole sequence.
        - documents: [B, S], int32 or int64, the document of each token; a document is a run of equal
          numbers.  Tokens see their own document alone, and positions begin anew in each.  With a
          group it is this rank's shard, as tokens are.
        - cu_seqlens: int32 [n + 1], as nn.Attention takes it: tokens [1, T] are n sequences side by
          side, each of at most `context`; positions begin anew in each.  Not with a group or documents.
        - cache: what make_cache made, of as many sequences.  tokens are those behind the ones in it,
          which they see, and are put there; they are refused where there is no room.  With cu_seqlens
          the sequences have any numbers of new tokens, which the host reads.  There is no gradient, and
          no group, mask, documents and positions beside it.
        - positions: [S] or [B, S], int32 or int64, from 0 to context - 1, in the place of 0 to S - 1;
          S may then be more than the context.  With mask this is for sequences that share prefixes:
          see flashproto.integrations.trees.  Not with a group, documents and cu_seqlens, nor in a model
          with windows, which count tokens of the row.
        """
        if return_logits not in (True, False, "last"):
            takes, do = "True, False or 'last'", "Leave it out for all of them."
            refuse("GPT", "return_logits", described(return_logits), takes, do)
        if return_logits == "last" and targets is not None:
            takes, do = "True or False beside targets", "Leave targets out."
            refuse("GPT", "return_logits", "'last'", takes, do)
        if return_logits == "last" and isinstance(tokens, Tensor) and 0 in tokens.shape[1:]:
            takes = "at least one token where return_logits is 'last'"
            refuse("GPT", "tokens", f"of shape {list(tokens.shape)}", takes, "Pass a prompt.")
        others: dict[str, Any] = {"group": group, "documents": documents}
        if cache is not None:
            others |= {"mask": mask, "positions": positions}
            at = self._positions_in(cache, tokens, cu_seqlens, others)
        elif positions is not None:
            at = self._positions_given(positions, tokens, others | {"cu_seqlens": cu_seqlens})
        else:
            at, mask = self._positions(tokens, group, mask, cu_seqlens, documents)
        device = tokens.device
        x, residual, rope = self.embedding(tokens), None, None
        options = given({"group": group, "mask": mask, "cu_seqlens": cu_seqlens})
        if self.positions is not None:
            x = x + self.positions(at)
        elif cache is not None:
            rope = self._tables_of(cache)
        else:
            rows = at
            if at.ndim == 2:
                rows, options["positions"] = torch.arange(self.config.context, device=device), at
            c = self.config
            rope = rope_tables_at(rows, c.head_dim, c.rope_theta, c.rope_scaling)
        layers = [{}] * len(self.blocks) if cache is None else [{"cache": x} for x in cache.layers]
        for block, own in zip(self.blocks, layers, strict=True):
            x, residual = block(x, residual, rope, **options, **own)
        if cache is not None:
            cache.advance()
        if return_logits == "last":
            last = slice(-1, None) if cu_seqlens is None else (cu_seqlens[1:] - 1).long()
            x, residual = x[:, last], cast(Tensor, residual)[:, last]
        x, _ = norm_before_linear(self.norm, x, cast(Tensor, residual))
        if return_logits == "last":
            x = x[:, 0] if cu_seqlens is None else x[0]
        head, fused = self.head, targets is not None and not return_logits
        bias = None
        if head is None:
            weight = self._tied_matrix(device)
        elif fused and is_as_made(head, Linear, nn.Linear):
            weight, bias = head.weight, head.bias
        else:
            fused = False
        if targets is not None and fused:
            return None, cast(Tensor, linear_cross_entropy(x, weight, targets, bias, impl=self.impl))
        logits = F.linear(x, weight) if head is None else head(x)
        if targets is None:
            return logits, None
        loss = cast(Tensor, cross_entropy(logits, targets, impl=self.impl))
        return logits if return_logits else None, loss

    def _positions(
        self,
        tokens: Tensor,
        group: ProcessGroup | None,
        mask: masks.Mask | None,
        cu_seqlens: Tensor | None,
        documents: Tensor | None,
    ) -> tuple[Tensor, masks.Mask | None]:
        """Those of the tokens, once these are checked: [S], or [B, S] where they begin anew on the way;
        and the mask, with the documents in it."""
        name, size, context = "GPT", 1, self.config.context
        self._check_tokens(name, tokens)
        device = tokens.device
        if group is not None:
            from .. import distributed  # torch may be built without process groups
            from ..distributed.group import group_of

            size = group_of(name, group).size
        length = size * tokens.shape[1]
        if cu_seqlens is not None:
            if group is not None or documents is not None:
                takes, do = "None beside group and documents", "Leave one of them out."
                refuse(name, "cu_seqlens", described(cu_seqlens), takes, do)
            check_cu_seqlens(name, cu_seqlens)
            at = positions_of(cu_seqlens, length)
            if length and is_readable(at) and (longest := int(at.amax()) + 1) > context:
                do = "Cut it into shorter ones."
                got, takes = f"of a sequence of {longest}", f"at most context, {context}"
                refuse(name, "cu_seqlens", got, takes, do)
            return at[None], mask
        if length > context:
            got = f"{length} long" + f" in {size} shards" * (size > 1)
            do = "Crop them: tokens[:, -context:]."
            refuse(name, "tokens", got, f"at most context, {context}", do)
        if documents is None:
            if group is not None:
                return distributed.positions(length, group, device=device), mask
            return torch.arange(length, device=device), mask
        if not isinstance(documents, Tensor) or documents.shape != tokens.shape:
            do = "Pass the document of each token."
            refuse(name, "documents", described(documents), "a tensor of the shape of tokens", do)
        if group is not None:
            documents = distributed.unshard(documents, 1, group)
        own = masks.documents(documents)
        begin, _ = cast(tuple[Tensor, Tensor], own.intervals(length, length))
        at = torch.arange(length, device=device) - begin[:, 0]
        at = at if group is None else distributed.shard(at, 1, group)
        return at, own if mask is None else mask & own

    def _positions_given(self, positions: Tensor, tokens: Tensor, others: dict[str, Any]) -> Tensor:
        """`positions`, once they and the tokens are checked."""
        name, c = "GPT", self.config
        self._check_tokens(name, tokens)
        positions = masks.check_vector(name, "positions", positions, "[S] or [B, S]", 1, 2)
        if not matches(positions.shape, tokens.shape[-positions.ndim :]):
            do = "Pass the position of each token."
            refuse_shape(name, "positions", positions, "[S] or [B, S], for the tokens given", do)
        for argument, x in others.items():
            if x is not None:
                takes, do = "None where positions is given", "Leave one of them out."
                refuse(name, argument, described(x), takes, do)
        if any(window is not None for window in c.windows):
            takes = "None in a model with windows, which count tokens of the row"
            do = "Pass sequences as documents, or use a model without windows."
            refuse(name, "positions", described(positions), takes, do)
        if positions.numel() and is_readable(positions):
            low, high = map(int, positions.aminmax())
            if low < 0 or high >= c.context:
                takes = f"0 to context - 1, {c.context - 1}"
                refuse(name, "positions", f"from {low} to {high}", takes, "Crop the sequences.")
        return positions

    def _positions_in(
        self, cache: KVCache, tokens: Tensor, cu_seqlens: Tensor | None, others: dict[str, Any]
    ) -> Tensor:
        """Positions [B, S], or [1, T], of tokens behind those in the cache, which has room for them."""
        name = "GPT"
        self._check_tokens(name, tokens)
        for argument, x in others.items():
            if x is not None:
                do = "Leave one of them out."
                refuse(name, argument, described(x), "None where cache is given", do)
        c, do = self.config, "model.make_cache makes it."
        if not isinstance(cache, KVCache):
            refuse(name, "cache", described(cache), "an nn.KVCache", do, TypeError)
        if len(cache.layers) != len(self.blocks) or cache.room > c.context:
            takes = f"one of {len(self.blocks)} layers and room for at most context, {c.context}"
            refuse(name, "cache", repr(cache), takes, do)
        B = tokens.shape[0]
        if cu_seqlens is not None:
            check_cu_seqlens(name, cu_seqlens)
            B = cu_seqlens.shape[0] - 1
        if cache.batch != B:
            do = "Make a cache for as many."
            refuse(name, "cache", f"of {cache.batch} sequences", f"one for each of {B}", do)
        if cu_seqlens is None:
            cache.reserve(tokens.shape[1])
            at = torch.arange(tokens.shape[1], device=tokens.device).expand(B, -1)
            first = cache.lengths[:, None]
        else:
            own = cu_seqlens.diff().tolist()
            if tokens.shape[0] != 1 or sum(own) != tokens.shape[1]:
                takes = f"[1, {sum(own)}], for the cu_seqlens given"
                refuse_shape(name, "tokens", tokens, takes, "Put all tokens side by side.")
            cache.reserve(own)
            at = positions_of(cu_seqlens, tokens.shape[1])[None]
            first = cache.lengths.repeat_interleave(cu_seqlens.diff(), output_size=sum(own))[None]
        return at + first

    def _tables_of(self, cache: KVCache) -> Any:
        """RoPE's of this model for the positions in a cache, which keeps them: models may share it."""
        c = self.config
        key = c.head_dim, c.rope_theta, c.rope_scaling
        if key not in cache.ropes:
            rows = torch.arange(cache.room, device=cache.lengths.device)
            cache.ropes[key] = rope_tables_at(rows, *key)
        return cache.ropes[key]

    def make_cache(
        self,
        batch: int,
        room: int | None = None,
        *,
        chunk: int = 512,
        page_size: int | None = None,
        pages: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An nn.KVCache for `batch` sequences of up to `room` tokens, `context` by default.

        dtype is autocast's where that is on, else the model's; chunk, page_size and pages are as in
        KVCache.  Raises what that raises, and ValueError for more room than `context`.

        Example:
            >>> model = nn.GPT(nn.GPTConfig.preset("toy", n_layers=1, d_model=32))
            >>> cache = model.make_cache(batch=2, room=64)
            >>> tokens = torch.randint(256, (2, 9))
            >>> with torch.no_grad():
            ...     prompt, _ = model(tokens[:, :8], cache=cache)
            ...     logits, _ = model(tokens[:, 8:], cache=cache)
            >>> torch.allclose(logits[:, 0], model(tokens)[0][:, 8], atol=1e-5), cache.counts
            (True, [9, 9])
        """
        c, weight = self.config, next(self.parameters())
        room = c.context if room is None else room
        takes, do = f"1 to context, {c.context}", "Leave it out for all of it."
        check_integer("GPT.make_cache", "room", room, 1, c.context, takes, do)
        return KVCache(
            batch,
            room,
            c.n_layers,
            c.kv_heads,
            c.head_dim,
            windows=c.windows,
            chunk=chunk,
            page_size=page_size,
            pages=pages,
            dtype=dtype or autocast_dtype(weight) or weight.dtype,
            device=weight.device,
        )

    def _tied_matrix(self, device: torch.device) -> Tensor:
        """The embedding as the output matrix [V, C]."""
        if is_plain(self.embedding, Embedding, nn.Embedding):
            return self.embedding.weight
        return self.embedding(torch.arange(self._vocabulary, device=device))

    @property
    def _vocabulary(self) -> int:
        """V, also of an embedding of another size in the place of the model's own."""
        return getattr(self.embedding, "num_embeddings", self.config.vocab_size)

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            do = "Pass torch.tensor(ids)[None]."
            refuse(name, "tokens", described(tokens), "a tensor [B, S] of token ids", do, TypeError)
        if tokens.ndim != 2:
            refuse_shape(name, "tokens", tokens, "[B, S]", "tokens[None] adds a batch dimension.")
        if tokens.dtype not in (torch.int64, torch.int32):
            refuse(name, "tokens", f"of dtype {tokens.dtype}", "int64 or int32", "Pass token ids.")
        # On a GPU in generate alone, once: to look at ids there is to wait for it.
        waits = name != "GPT" and tokens.is_cuda and type(tokens) is Tensor
        if tokens.numel() and (waits or is_readable(tokens)):
            low, high = map(int, tokens.aminmax())
            if low < 0 or high >= self._vocabulary:
                refuse(
                    name,
                    "tokens",
                    f"from {low} to {high}",
                    f"ids from 0 to {self._vocabulary - 1}",
                    "Encode the text with this model's vocabulary.",
                )

    @torch.no_grad()
    def generate(
        self,
        tokens: Tokens,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_tokens: int | Sequence[int] = (),
        seeds: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        prompt_lookup: int = 0,
        on_token: Callable[[int, int], object] | None = None,
        cache: KVCache | None = None,
        cuda_graph: bool | None = None,
    ) -> Tokens:
        """Continue tokens [B, S] by max_new_tokens samples: [B, S + max_new_tokens].

        The prompts go through the model once; then each new token goes by itself, and sees the keys and
        values of all others in a cache.  Tokens may also be a list of prompts [S_b] of any lengths; the
        result is then such a list.  It can be trained on.

        A token sees the tokens before it, up to `context` in all: of a longer prompt the last ones.
        Where a text grows past the context, its last half goes through the model again as a prompt
        of context / 2 tokens, and then as many new tokens find room.

        - temperature divides the logits; 0, and one so small that it comes to the same, takes the most
          likely token.  top_k keeps that many of the tokens; None, or more than there are, keeps all.
          top_p then keeps the fewest tokens whose probabilities sum to top_p, and min_p those that are
          at least min_p times as likely as the likeliest.
        - repetition_penalty: logits of tokens that the text has are divided by it where they are
          positive, else multiplied (Keskar et al., "CTRL", 2019); 1 for none.
        - stop_tokens: ids that end their sequence.  In a list a sequence ends with it; in a tensor
          the stop token is then repeated.  When all sequences have ended, generate does.
        - seeds: a number for each sequence.  What is drawn for a sequence depends on its own seed, not
          on the others in the batch.  None: they are drawn from generator, of the model's device.
        - prompt_lookup: guess this many tokens, 1 to 15, from what followed the last ones when the text
          had them before (Saxena, "Prompt Lookup Decoding", 2023), and check all in one call.
          Guesses that are what would have been drawn are kept: the distribution stays the same, and
          so does the text of a seed, but for rounding.  It is faster where texts repeat themselves.
        - on_token(b, token) is called with each new token of sequence b as soon as it is there, and may
          return True to end the sequence with it.
        - cache: what make_cache made, for as many sequences, which is reset; None makes one.  The room
          in it takes the place of `context`.
        - cuda_graph: whether one step is captured and then replayed, and kept with the cache that is
          passed in; None: on a GPU, where the model has no hooks and is not sharded, and without
          autocast.  True raises where it cannot be.

        Raises ValueError for an argument out of range and TypeError for one of another type.

        Example:
            >>> model = nn.GPT(nn.GPTConfig.preset("toy", n_layers=1, d_model=32))
            >>> prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
            >>> texts = model.generate(prompts, 5, temperature=0.8, top_p=0.9, seeds=[0, 1])
            >>> [len(text) for text in texts]
            [8, 6]
        """
        name = "GPT.generate"
        prompts = self._prompts(tokens)
        takes, do = "an integer of 0 or more", "Pass how many to add."
        most = check_integer(name, "max_new_tokens", max_new_tokens, 0, sys.maxsize, takes, do)
        how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty).checked(name)
        takes, do = "an integer from 0 to 15", "Pass 0 for none."
        lookup = check_integer(name, "prompt_lookup", prompt_lookup, 0, 15, takes, do)
        takes, last = f"ids from 0 to {self._vocabulary - 1}", self._vocabulary - 1
        stop: Any = [stop_tokens] if is_integer(stop_tokens) else stop_tokens
        if not isinstance(stop, Iterable) or isinstance(stop, Tensor):
            refuse(name, "stop_tokens", described(stop), takes, "Pass a list of ids.", TypeError)
        stop = {check_integer(name, "stop_tokens", i, 0, last, takes, "Pass ids.") for i in stop}
        B, device = len(prompts), next(self.parameters()).device
        if seeds is not None:
            takes = f"{B} numbers, a seed for each sequence, without generator"
            if not isinstance(seeds, Sized) or isinstance(seeds, Tensor):
                refuse(name, "seeds", described(seeds), takes, "Pass range(B), say.", TypeError)
            if generator is not None or len(seeds) != B:
                refuse(name, "seeds", f"of {len(seeds)} numbers", takes, "Pass one of the two.")
        if not (generator is None or isinstance(generator, torch.Generator)):
            takes, do = "a torch.Generator, or None", "Pass seeds, or torch.Generator(device)."
            refuse(name, "generator", described(generator), takes, do, TypeError)
        if not (on_token is None or callable(on_token)):
            takes, do = "a function of (b, token), or None", "Pass print, say."
            refuse(name, "on_token", described(on_token), takes, do, TypeError)
        cuda_graph = None if cuda_graph is None else check_flag(name, "cuda_graph", cuda_graph)
        if cache is not None and (not isinstance(cache, KVCache) or cache.batch != B):
            takes, do = f"a KVCache of {B} sequences", "model.make_cache(B) makes one."
            got = repr(cache) if isinstance(cache, KVCache) else described(cache)
            refuse(name, "cache", got, takes, do)
        if cache is not None and cache.rolls and lookup >= cache.chunk:
            takes = f"less than chunk of the cache, {cache.chunk}"
            refuse(name, "prompt_lookup", lookup, takes, "Make the cache with a larger chunk.")
        if not B or not most:
            return tokens
        if cache is None:
            room = max(x.shape[0] for x in prompts) + most + lookup
            cache = self.make_cache(B, min(room, self.config.context))
        new = generated(
            self,
            prompts,
            most,
            how,
            vocabulary=self._vocabulary,
            stop=stop,
            seeds=seeds_of(name, seeds, B, generator, device),
            lookup=lookup,
            on_token=on_token,
            cache=cache,
            cuda_graph=cuda_graph,
        )
        if not isinstance(tokens, Tensor):
            return [torch.cat([x, y]) for x, y in zip(prompts, new, strict=True)]
        longest = max(x.shape[0] for x in new)
        rows = [torch.cat([x, x[-1:].expand(longest - x.shape[0])]) for x in new]
        return torch.cat([tokens, torch.stack(rows)], 1)

    def _prompts(self, tokens: Any) -> Sequence[Tensor]:
        """[S] each, of a tensor [B, S] or a list."""
        name, is_list = "GPT.generate", isinstance(tokens, (list, tuple))
        if not is_list or not all(isinstance(x, Tensor) for x in tokens):
            self._check_tokens(name, tokens)
        for prompt in tokens if is_list else [tokens]:
            if is_list and prompt.ndim != 1:
                do = "list(tokens) makes one of [B, S]."
                refuse_shape(name, "tokens", prompt, "[S] in a list", do)
            if is_list:
                self._check_tokens(name, prompt[None])
            if prompt.shape[-1] == 0:
                refuse(name, "tokens", "of length 0", "at least one token", "Begin with a separator.")
        return list(tokens)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GPT:
        """The model of a local folder with a GPT-2 or a Llama in transformers' layout.

        It reads config.json, and model.safetensors or the files that model.safetensors.index.json
        names, and nothing else: no network, no pickle, no code.  Names, shapes and dtypes of all
        tensors are checked against config.json before memory is taken.  It is then taken once, on
        `device` (None: torch's default one), and filled tensor by tensor.

        dtype: of the parameters.  None is the files', which is then one for all, and that of
        config.json where it names one.

        Raises: ValueError: something in the folder is missing, damaged, unknown, or of no such model
        here, by its name; TypeError: an argument is of another type; ModuleNotFoundError: the package
        safetensors is not installed.

        Example:
            >>> model = nn.GPT(nn.GPTConfig.preset("toy-llama", n_layers=1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     model.save_pretrained(folder)
            ...     same = nn.GPT.from_pretrained(folder, dtype=torch.bfloat16)
            >>> same.config.n_layers, same.embedding.weight.dtype
            (1, torch.bfloat16)
        """
        source = pretrained.Folder(folder, dtype)
        config = source.config(GPTConfig)
        model = cls(config, impl=impl, device="meta", dtype=source.dtype)
        return source.fill(model, config, device)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors, from which transformers makes the same model, as
        GPT2LMHeadModel or LlamaForCausalLM, and from_pretrained too, bit for bit.

        The folder is made if need be, and has neither of them yet; a tokenizer.json may lie there.

        Raises: ValueError: the model is neither a GPT-2 (LayerNorm, GELU, learned positions, biases)
        nor a Llama (RMSNorm, SwiGLU, RoPE), or has other parameters than its config says; OSError: a
        file cannot be written; TypeError, ModuleNotFoundError: as in from_pretrained.
        """
        pretrained.save(self, GPT(self.config, device="meta"), self.config, folder)

    def parameter_count(self) -> int:
        """Every parameter, a tied one once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int | None = None) -> int:
        """Floating-point operations of one training step per token, forward and backward.

        6 for each weight of a matrix product and 12 n_layers Hq D S for attention over S = length
        (context by default) tokens, causal or not: the usual convention for MFU, from Chowdhery et
        al., "PaLM" (2022), appendix B.  In a layer with a window S is at most what a token sees.
        """
        c = self.config
        looked_up = [self.positions, None if self.head is None else self.embedding]
        tables = sum(p.numel() for table in looked_up if table is not None for p in table.parameters())
        S = c.context if length is None else length
        seen = sum(S if window is None else min(S, window + 1) for window in c.windows)
        return 6 * (self.parameter_count() - tables) + 12 * c.n_heads * c.head_dim * seen
