"""Names of Gluon's Hopper operations that differ between Triton 3.6 and 3.9: the one place for them."""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# barrier(): all threads of a program wait for one another, and see what they wrote to shared memory.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# copy_to_shared(buffer, pointers, mask=None): an asynchronous copy (cp.async) of elements.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# tma_load(descriptor, coordinates, mbarrier, buffer): an asynchronous copy of one box to shared memory.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# tma_store(descriptor, coordinates, buffer): an asynchronous copy of one box to global memory.
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def reinterpreted(buf, shape, _semantic=None):
    """The memory of a buffer as another shape, laid out by the same rule; a method of two names."""
    sizes = [getattr(n, "value", n) for n in shape]
    return _semantic.memdesc_reinterpret(buf, buf.dtype, sizes, buf.layout)


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
