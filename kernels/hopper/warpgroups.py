"""What warpgroups of both Hopper kernels share: named barriers, views of tiles, layouts of products and
of 16-byte output rows, a zero that the compiler does not know.

Why named barriers: Gluon's mbarrier.arrive synchronises the whole warpgroup twice around the arrival of
one thread.  `bar.arrive` lets every thread pass on, and whoever needs the buffer waits with `bar.sync`.
A program has 16 named barriers.  Triton's own come from the lowest numbers, ours from the highest.

How partitions begin and end.  Triton tells each warp in a byte of shared memory which partition it is,
or that the kernel is over, between barriers of all threads.  The racecheck of compute-sanitizer
2025.3.1 seems to compare how many barriers a reader and a writer have waited at, whoever else took
part, and to report a race where the first partition has waited at more.  So the mbarriers are made
ready behind Triton's hand-over, by the first partition, for which the others wait at a named barrier;
and nobody comes to hear that the kernel is over: each thread ends itself (exit_threads).  No warp may
be without a partition then, as it would wait for ever: some partitions only exit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def bar_sync(id, N: gl.constexpr):
    """Wait at named barrier `id` until N threads have arrived, this warpgroup's 128 included."""
    gl.inline_asm_elementwise(
        f"bar.sync $1, {N}; mov.u32 $0, 0;", "=r,r", [id], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def bar_arrive(id, N: gl.constexpr):
    """Arrive at named barrier `id`, one of N threads, and go on."""
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {N}; mov.u32 $0, 0;", "=r,r", [id], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def static_sync(ID: gl.constexpr, N: gl.constexpr):
    """bar_sync at a barrier known when compiling."""
    gl.inline_asm_elementwise(
        f"bar.sync {ID}, {N}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def static_arrive(ID: gl.constexpr, N: gl.constexpr):
    """bar_arrive at a barrier known when compiling."""
    gl.inline_asm_elementwise(
        f"bar.arrive {ID}, {N}; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exit_threads():
    """End the thread.  Every partition does so last, or none does.

    The exit has a condition that always holds, which ptxas notices late.  If it knew at once that the
    thread ends here, it would spill a word in three of the forward's kernels.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 x;
        mov.u32 x, %tid.x;
        setp.lt.u32 p, x, 4096;
        mov.u32 $0, 0;
        @p exit;
        }""",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def exit_threads_if(n, most):
    """exit_threads where n >= most, which always holds too, but ptxas cannot know it."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ge.s32 p, $1, $2;
        mov.u32 $0, 0;
        @p exit;
        }""",
        "=r,r,r",
        [n, most],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def opaque_zero():
    """A zero that the compiler cannot see through."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def matrix(buf, R: gl.constexpr, D: gl.constexpr):
    """The [R, D] view of a TMA box [1, 1, R, D]."""
    return buf.reshape([R, D])


@gluon.constexpr_function
def accumulator(N):
    """Layout of a warpgroup's product [64, N]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])


@gluon.constexpr_function
def left_operand(product):
    """Layout in registers of a half type's matrix that is the left operand of a product."""
    return gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)


@gluon.constexpr_function
def wide_rows(D):
    """Layout of [64, D] with 8 neighbouring columns (16 bytes of a half type) in each thread: a shuffle
    among four lanes away from the accumulator's, and full sectors when stored."""
    columns = [[0, 1 << i] for i in range(5, D.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], *columns, [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, D])
