"""Attention and norms of tensors that lie in shards on several ranks, on torch.distributed.

Every rank of a group makes the same calls, forward and backward, in the same order.  The gradient of a
shard is that of the sum of all ranks' losses.  Parameters that ranks share have on each rank the
gradient from its own shard: sum them over the group, as data parallelism does.

The examples are of a process group of one rank.
"""

from .attention import ring_attention
from .norm import layer_norm, rms_norm
from .order import positions, shard, unshard

__all__ = ["layer_norm", "positions", "ring_attention", "rms_norm", "shard", "unshard"]
