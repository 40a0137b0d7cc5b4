"""Attention and norms of tensors that lie in shards on several ranks, on torch.distributed.

Every rank of a group makes the same calls, forward and backward, in the same order.  The gradient of a
shard is that of the sum of all ranks' losses.  Parameters that ranks share have on each rank the
gradient from its own shard: sum them over the group, as data parallelism does.

Calls that differ by rank end their processes, wait until the group's timeout, or return wrong numbers.
With FLASHPROTO_CHECKED=1 in the environment of all ranks, these compare their calls before anything
travels, and all raise the same error, which names the argument and the ranks.  A rank whose own
arguments are refused tells the others, unless it is the group that is refused.  Every call then waits
for all ranks and for the GPU, so use it to find faults only.  Calls in CUDA graphs are not compared.

The examples are of a process group of one rank.
"""

from .attention import ring_attention
from .norm import layer_norm, rms_norm
from .order import positions, shard, unshard

__all__ = ["layer_norm", "positions", "ring_attention", "rms_norm", "shard", "unshard"]
