"""Names of Gluon's Hopper operations that differ between Triton 3.6 and 3.9: the one place for them."""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# tma_load(descriptor, coordinates, mbarrier, buffer): an asynchronous copy of one box to shared memory.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# tma_store(descriptor, coordinates, buffer): an asynchronous copy of one box to global memory.
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:

    @builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Add a box of shared memory to global memory (cp.reduce.async.bulk.tensor.add); Triton 3.6
        binds the builder's method and gives it no name."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
        )
