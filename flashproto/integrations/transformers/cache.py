"""A cache of keys and values for generate: one call appends the new tokens' and attends."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils

from ... import functional
from ...checks.errors import described, refuse
from ...checks.options import check_integer
from ...functional.autocast import autocast_low_precision
from .masks import CACHED, DO_CACHE, OPERATOR, Padding

NAMES: set[str] = set()  # of attention implementations that are registered
TAKEN = ("full_attention", "sliding_attention")  # of a config's layer_types
LONGEST = 2**30 - 1


class Layer(cache_utils.CacheLayerMixin):
    """One layer's keys and values, [B, room, Hkv, D] and [B, room, Hkv, Dv], tokens before heads.

    lengths: int32 [B], on the device: how many keys a sequence has.  counted: the same on the host,
        None behind a compiled call.  starts: int32 [B], the first key that counts, None for 0.
    """

    is_compileable = True
    is_croppable = True

    def __init__(self, config: PreTrainedConfig, room: int, window: int | None, is_first: bool) -> None:
        super().__init__()
        self.config, self.room, self.window, self.is_first = config, room, window, is_first
        self.is_sliding = window is not None
        self.counted: int | None = 0
        self.starts: Tensor | None = None
        self.is_waiting = False  # for the attention to the keys that update was given

    @property
    def keys(self) -> NoReturn:
        """Models that look for them would attend to these rows by themselves."""
        refuse_keys()

    @keys.setter
    def keys(self, x: None) -> None: ...

    values = keys

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, D = key_states.shape
        self.device, self.dtype = key_states.device, key_states.dtype
        self.k_cache = key_states.new_zeros(B, self.room, H, D)
        self.v_cache = value_states.new_zeros(B, self.room, H, value_states.shape[3])
        self.lengths = torch.zeros(B, dtype=torch.int32, device=key_states.device)
        if not torch.compiler.is_compiling():  # a CUDA graph reads them where they are
            for x in (self.k_cache, self.v_cache, self.lengths):
                torch._dynamo.mark_static_address(x, guard=False)  # other caches compile nothing
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are, with a note that they are this layer's."""
        self.check_implementation()
        if self.is_waiting:
            refuse_keys()
        key_states, value_states = autocast_low_precision(key_states, value_states)
        if not self.fits(key_states):
            self.lazy_initialization(key_states, value_states)
        self.check_room(key_states.shape[2])
        self.is_waiting = True
        if torch.compiler.is_compiling():
            # torch 2.11 cannot put an attribute on a result of an op with several.
            key_states = key_states.view(key_states.shape)
        key_states.flashproto_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def fits(self, key_states: Tensor) -> bool:
        """Whether rows are there for these sequences; an empty cache may get others."""
        if not self.is_initialized or torch.compiler.is_compiling():
            return self.is_initialized
        mine, given = (
            f"of {len(x)} sequences in {x.dtype} on {x.device}" for x in (self.k_cache, key_states)
        )
        if mine != given and self.tokens > 0:
            do = "Call its reset() for other prompts, or make another one."
            refuse(OPERATOR, "Cache", mine, f"one {given} for this call", do)
        return mine == given

    def check_room(self, new: int) -> None:
        """There has to be room for the new tokens; in a compiled step the device tells, once."""
        if not torch.compiler.is_compiling():
            tokens = self.tokens + new
            if tokens > self.room:
                got, takes = f"of room for {self.room} tokens", f"at least {tokens} tokens"
                do = "Pass as room= the tokens of the prompt and max_new_tokens together."
                refuse(OPERATOR, "Cache", got, takes, do)
        elif self.is_first:
            words = "flashproto: more tokens than Cache has room for"
            torch._assert_async((self.lengths <= self.room - new).all(), words)

    @property
    def tokens(self) -> int:
        """How many there are; behind a compiled call it waits for the device."""
        if self.counted is None:
            self.counted = int(self.lengths.max())
        return self.counted

    def pad(self, given: Any) -> None:
        """Take what a mask says of the padding; its window has to be the layer's."""
        if not isinstance(given, Padding):
            takes = "the padding, [B, S], beside Cache"
            refuse(OPERATOR, "attention_mask", described(given), takes, DO_CACHE, NotImplementedError)
        left = None if self.window is None else self.window - 1
        if given.left != left:
            got, takes = (f"{'all' if n is None else n} tokens back" for n in (given.left, left))
            name = "what the model's mask lets a query see"
            refuse(OPERATOR, name, got, takes, DO_CACHE, NotImplementedError)
        self.starts = given.starts

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of q [B, Hq, n, D] to what is cached and to k and v, which are put there."""
        if not self.is_waiting:
            refuse_keys()
        self.is_waiting = False
        (q,) = autocast_low_precision(q)
        out: Any = functional.attention_with_kv_cache(
            q,
            self.k_cache,
            self.v_cache,
            lengths=self.lengths,
            k=k,
            v=v,
            starts=self.starts,
            window=None if self.window is None else (self.window - 1, 0),
            **options,
        )
        self.counted = None if torch.compiler.is_compiling() else self.tokens + k.shape[2]
        self.lengths += k.shape[2]
        return out

    def check_implementation(self) -> None:
        """Another attention would take what update gives for all keys."""
        if self.config._attn_implementation not in NAMES:
            takes = f"one that register() gave: {', '.join(sorted(NAMES)) or 'none yet'}"
            do = (
                "Call model.set_attn_implementation(register()); a model that stays with its own needs"
                " another cache."
            )
            refuse(OPERATOR, "attn_implementation", self.config._attn_implementation, takes, do)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.check_implementation()
        return self.room, CACHED

    def get_seq_length(self) -> Any:
        if not self.is_initialized:
            return 0
        # Reading it would wait for the device.
        unread = torch.compiler.is_compiling() or self.counted is None
        return self.lengths[0] if unread else self.counted

    def get_max_length(self) -> int:
        return self.room

    # --- rows and tokens that go ---

    def take(self, rows: Tensor) -> None:
        """Keep these sequences, in this order."""
        if not self.is_initialized:
            return
        rows = rows.to(self.device)
        for name in ("k_cache", "v_cache", "lengths", "starts"):
            x = getattr(self, name)
            if x is not None and x.shape[0] == rows.shape[0] and name != "starts":
                x.copy_(x[rows])  # in its place, where a CUDA graph reads it
            elif x is not None:
                setattr(self, name, x[rows])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.take(torch.arange(len(self.lengths), device=self.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is negative, as transformers' layers take it."""
        if tokens_to_remove > 0:
            takes, do = "0 or a negative number of tokens", "Pass -n to remove the last n."
            refuse(OPERATOR, "crop", tokens_to_remove, takes, do)
        if self.is_initialized:
            self.lengths.add_(tokens_to_remove).clamp_(min=0)
            self.counted = None if self.counted is None else max(0, self.tokens + tokens_to_remove)

    def reset(self) -> None:
        self.is_waiting, self.starts, self.counted = False, None, 0
        if self.is_initialized:
            self.lengths.zero_()

    def offload(self) -> None:
        takes = "False: rows stay where they are"
        refuse(OPERATOR, "offloading", True, takes, DO_CACHE, NotImplementedError)

    prefetch = offload


def refuse_keys() -> NoReturn:
    got = "a model whose attention is not to the keys that it caches"
    takes = "models that hand on what update() gives"
    refuse(OPERATOR, "Cache", got, takes, DO_CACHE, NotImplementedError)


def layer_of(key: Tensor) -> Layer | None:
    """The layer whose update gave these keys."""
    return getattr(key, "flashproto_layer", None)


class Cache(cache_utils.Cache):
    """A cache for generate of models whose attention is register()'s.

    Keys and values lie in rows with room for a fixed number of tokens.  Each layer appends the new
    tokens' and attends in one call of attention_with_kv_cache, whose time follows the lengths and not
    the room.  transformers' own caches copy what they have, or attend to all their room.  Lengths are
    on the device, so that a step compiles, and generate on a GPU replays it as one CUDA graph.  Prompts
    may be padded on the left.  There are no gradients: call the model under torch.no_grad, as generate
    does.

    Args:
        config: the model's, model.config.
        room: for how many tokens of a sequence, prompt and new ones.  More are an error before anything
            is written; in a compiled step the device raises it.

    Raises:
        NotImplementedError: layers other than full attention and sliding windows (chunks as in Llama 4,
            shared keys, states), caches of latents (DeepSeek's MLA), encoder-decoders; when it is used
            also holes in the padding, padding behind the tokens, masks of the model's own, dropout, and
            models that attend to other keys than they cache;
        ValueError: a room that is no positive integer, an attention that register() did not make.

    Example:
        >>> from flashproto.integrations.transformers import Cache, register
        >>> model.set_attn_implementation(register())
        >>> model.generate(**inputs, cache=Cache(model.config, room=4096), max_new_tokens=100)
    """

    def __init__(self, config: PreTrainedConfig, room: int) -> None:
        takes, do = "a positive number of tokens", "Pass 4096, say."
        room = check_integer(OPERATOR, "room", room, 1, LONGEST, takes, do)
        if not hasattr(config, "get_text_config"):
            takes, do = "a model's config", "Pass model.config."
            refuse(OPERATOR, "Cache's config", described(config), takes, do, TypeError)
        text = config.get_text_config(decoder=True)
        if text.is_encoder_decoder:
            refuse_model("an encoder-decoder", "decoders alone")
        if getattr(text, "kv_lora_rank", None) is not None:
            refuse_model("of a model that caches latents (MLA)", "models that cache keys and values")
        kinds, options = cache_utils.get_layer_types_and_kwargs(text)
        for kind in kinds:
            if kind not in TAKEN:
                refuse_model(f"of a model with layers of {kind!r}", " and ".join(TAKEN))
        windows = [x.get("sliding_window") for x in options]
        super().__init__(layers=[Layer(text, room, x, i == 0) for i, x in enumerate(windows)])


def refuse_model(got: str, takes: str) -> None:
    refuse(OPERATOR, "Cache's config", got, takes, DO_CACHE, NotImplementedError)
