"""The online-softmax state in registers, for scores that wgmma made: updated without a maximum.

This is the state (m, l) of ../online_softmax.py in another form.  A row of an accumulator lies in four
lanes.  Each lane has, for each of its rows,

    shift   -scale * m, where m need not be the maximum so far, only near it; UNSEEN before any score
    l       this lane's part of the sum of 2^(scale * x + shift)

Any m gives the same softmax, as long as nothing overflows and what matters does not vanish.  So a tile
is exponentiated with the present shift.  Only where a lane's sum passes LIMIT (a score passed the shift
by 8 to 13 powers of two, or the row saw nothing before) does the row take its true maximum and repeat
its exponentials; alpha is then not 1.  The usual tile needs no maximum, no exchange between lanes and
no multiplication of the accumulator: two thirds of the instructions of the textbook update.  Which rows
are renewed depends on their own scores alone.  (Skipping small rescalings is FlashAttention-4's idea;
it still takes the maximum of every tile.)

Gluon's `if` needs a scalar, which costs a reduction over the warpgroup, but in PTX a warp can decide
for itself.  Hence the two pieces of inline assembly below.  A thread's accumulator elements go pairwise
to its two rows: 4 i and 4 i + 1 to one, 4 i + 2 and 4 i + 3 to the row 8 below.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..online_softmax import LOG2E, online_softmax_finish, online_softmax_merge

UNSEEN = gl.constexpr(1e30)  # finite: -inf + UNSEEN is -inf, a row of masked scores sums to 0
LIMIT = gl.constexpr("0f46000000")  # 2^13
ONE = gl.constexpr("0f3F800000")

# --- values of each row and lane: [64, 4] -----------------------------------------------------------


@gluon.constexpr_function
def lanes():
    """Layout [64, 4] of one value for each row and each of its four lanes."""
    threads = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], threads, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def spread(a, x):
    """a [64, 4] in the shape and layout of the accumulator x [64, C]."""
    y = x.reshape([64, x.shape[1] // 8, 4, 2])
    L: gl.constexpr = y.type.layout
    a = gl.convert_layout(a, gl.SliceLayout(1, gl.SliceLayout(3, L)), assert_trivial=True)
    a, y = gl.broadcast(a[:, None, :, None], y)
    return gl.convert_layout(a.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def leading(a):
    """The first of the last dimension of a [64, 4, 2, 4 or 8], as [64, 4]."""
    if a.shape[2] == 8:
        a, _ = gl.split(a.reshape([64, 4, 4, 2]))
    if a.shape[2] == 4:
        a, _ = gl.split(a.reshape([64, 4, 2, 2]))
    if a.shape[2] == 2:
        a, _ = gl.split(a.reshape([64, 4, 1, 2]))
    return gl.convert_layout(a.reshape([64, 4]), lanes(), assert_trivial=True)


@gluon.jit
def lane_maxima(x):
    """The largest of each row and lane of the accumulator x [64, C], [64, 4]."""
    y = x.reshape([64, x.shape[1] // 8, 4, 2])
    return gl.convert_layout(gl.max(gl.max(y, 3), 1), lanes(), assert_trivial=True)


# --- one tile ---------------------------------------------------------------------------------------


@gluon.constexpr_function
def tile_assembly(n, half, skip):
    """PTX for the n scores of a thread; operands in the order of softmax_tile's call."""
    first = {"p": 0, "state": n // 2, "x": n // 2 + n, "shift": n // 2 + 2 * n, "l": n // 2 + 3 * n}

    def operand(name, i):
        return f"${first[name] + i}"

    scale, seen = f"${n // 2 + 4 * n}", f"${n // 2 + 5 * n}"

    def exponentials(m):
        """p and the sums of the first m scores."""
        lines = []
        for i in range(0, m, 2):
            k = i // 2 % 2  # which of the two rows
            a, b = operand("x", i), operand("x", i + 1)
            lines += [
                f"fma.rn.f32 a, {a}, {scale}, shift{k};",
                f"fma.rn.f32 b, {b}, {scale}, shift{k};",
                "ex2.approx.ftz.f32 a, a;",
                "ex2.approx.ftz.f32 b, b;",
                f"cvt.rn.{half}x2.f32 {operand('p', i // 2)}, b, a;",
                f"add.f32 sum{k}, sum{k}, a;" if i >= 4 else f"mov.f32 sum{k}, a;",
                f"add.f32 sum{k}, sum{k}, b;",
            ]
        return lines

    def top(k, m):
        """Row k's maximum of this lane's first m scores."""
        own = [operand("x", i) for i in range(m) if i // 2 % 2 == k]
        lines = []
        while len(own) > 4:  # four chains
            a, b = own[:4], own[4:8]
            lines += [f"max.f32 m{k}{i}, {x}, {y};" for i, (x, y) in enumerate(zip(a, b, strict=True))]
            own = [f"m{k}{i}" for i in range(4)] + own[8:]
        return [
            *lines,
            f"max.f32 top{k}, {own[0]}, {own[1]};",
            f"max.f32 a, {own[2]}, {own[3]};",
            f"max.f32 top{k}, top{k}, a;",
        ]

    def of_all_lanes(*values):
        """Maxima over the four lanes of a row."""
        return [
            line
            for lane in (1, 2)
            for value in values
            for line in (
                f"shfl.sync.bfly.b32 a, {value}, {lane}, 31, 0xffffffff;",
                f"max.f32 {value}, {value}, a;",
            )
        ]

    def renewed_shift(k):
        """-scale * top, where over{k}."""
        return [
            f"mul.f32 top{k}, top{k}, {scale};",
            f"neg.f32 top{k}, top{k};",
            f"selp.f32 shift{k}, top{k}, shift{k}, over{k};",
        ]

    def added():
        """The state with the tile's sums added, nothing rescaled."""
        return [
            line
            for k in (0, 1)
            for line in (
                f"mov.f32 {operand('state', 2 * k)}, shift{k};",
                f"add.f32 {operand('state', 2 * k + 1)}, {operand('l', 2 * k)}, sum{k};",
                f"mov.f32 {operand('state', 2 * k + 4)}, {ONE.value};",
            )
        ]

    lines = [
        "{",
        ".reg .pred over, over0, over1;",
        ".reg .f32 a, b, sum0, sum1, shift0, shift1, top0, top1;",
        ".reg .f32 m00, m01, m02, m03, m10, m11, m12, m13;",
        f"mov.f32 shift0, {operand('shift', 0)};",
        f"mov.f32 shift1, {operand('shift', 2)};",
    ]
    if skip:
        lines += [f"setp.lt.s32 over, {seen}, 2;", "@over bra.uni FEW;"]
    lines += [
        # No row of the warp has seen anything yet, so there is no shift to try.
        "mov.f32 sum0, 0f7F800000;",
        "mov.f32 sum1, 0f7F800000;",
        "min.f32 a, shift0, shift1;",
        "setp.ge.f32 over, a, 0f7149F2CA;",
        "vote.sync.all.pred over, over, 0xffffffff;",
        "@over bra.uni RENEW;",
        *exponentials(n),
        *added(),
        "max.f32 a, sum0, sum1;",
        f"setp.gtu.f32 over, a, {LIMIT.value};",
        "vote.sync.any.pred over, over, 0xffffffff;",
        "@!over bra.uni DONE;",
        "RENEW:",
    ]
    for k in (0, 1):
        lines += [
            *top(k, n),
            *of_all_lanes(f"top{k}", f"sum{k}"),
            f"setp.gtu.f32 over{k}, sum{k}, {LIMIT.value};",
            f"setp.neu.and.f32 over{k}, top{k}, 0fFF800000, over{k};",
            *renewed_shift(k),
            f"sub.f32 a, shift{k}, {operand('shift', 2 * k)};",
            f"ex2.approx.ftz.f32 {operand('state', 2 * k + 4)}, a;",
            f"mov.f32 {operand('state', 2 * k)}, shift{k};",
        ]
    lines += exponentials(n)
    for k in (0, 1):
        total, alpha = operand("state", 2 * k + 1), operand("state", 2 * k + 4)
        lines.append(f"fma.rn.f32 {total}, {operand('l', 2 * k)}, {alpha}, sum{k};")
    if skip:
        # This is the rightmost tile of which these rows see anything, or one to its right: l is 0.
        lines += [
            "bra.uni DONE;",
            "FEW:",
            *(f"mov.b32 {operand('p', i)}, 0;" for i in range(n // 2)),
            "mov.f32 sum0, 0f00000000;",
            "mov.f32 sum1, 0f00000000;",
            f"setp.lt.s32 over, {seen}, 1;",
            "@over bra.uni NONE;",
        ]
        for k in (0, 1):
            lines += [
                *top(k, n // 2),
                *of_all_lanes(f"top{k}"),
                f"setp.neu.f32 over{k}, top{k}, 0fFF800000;",
                *renewed_shift(k),
            ]
        lines += [*exponentials(n // 2), "NONE:", *added()]
    return "\n".join([*lines, "DONE:", "}"])


@gluon.constexpr_function
def tile_constraints(n, skip):
    return ",".join(["=&r"] * (n // 2) + ["=&f"] * n + ["f"] * (4 * n) + ["r"] * (n * skip))


@gluon.jit
def pack_halves(p):
    """Pack neighbours of p [64, C], of two bytes each, into int32 [64, C / 2].

    p crosses a loop's edge in this form.  In its own type each element would be taken out of its
    register there, and packed again afterwards.
    """
    a, b = gl.split(p.reshape([64, p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def softmax_tile(shift, l, x, scale, seen, dt: gl.constexpr, SKIP: gl.constexpr):
    """Take in raw scores x [64, C], C = 64 or 128; with SKIP, if `seen` is 1 only the first half of the
    columns, and below 1 none, which holds to the right of all that is seen.

    Returns (shift, l, p, alpha): the new state, the exponentials p in pairs of dt, int32 [64, C / 2],
    and the factor alpha [64, 4] by which everything accumulated before must be multiplied.
    """
    C: gl.constexpr = x.shape[1]
    CODE: gl.constexpr = tile_assembly(C // 2, "bf16" if dt == gl.bfloat16 else "f16", SKIP)
    OPERANDS: gl.constexpr = tile_constraints(C // 2, SKIP)
    scales = gl.zeros_like(x) + scale
    inputs = [x, spread(shift, x), spread(l, x), scales]
    if SKIP:
        inputs += [gl.full(x.shape, 0, gl.int32, x.type.layout) + seen]
    if dt == gl.bfloat16:
        p, state = gl.inline_asm_elementwise(
            CODE, OPERANDS, inputs, dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=C // 2
        )
    else:
        p, state = gl.inline_asm_elementwise(
            CODE, OPERANDS, inputs, dtype=(gl.float16, gl.float32), is_pure=True, pack=C // 2
        )
    # Of each row's elements the first is the shift, the second l, the third alpha.
    T: gl.constexpr = C // 8
    even, odd = gl.split(state.reshape([64, T, 4, 2]))
    shifts, alphas = gl.split(even.permute((0, 2, 1)).reshape([64, 4, T // 2, 2]))
    sums, _ = gl.split(odd.permute((0, 2, 1)).reshape([64, 4, T // 2, 2]))
    return leading(shifts), leading(sums), pack_halves(p), leading(alphas)


@gluon.jit
def unpack_halves(p, L: gl.constexpr, dt: gl.constexpr):
    """Pairs of dt in int32 p [64, C / 2] as [64, C] in layout L, that of a product's first operand."""
    CODE: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    if dt == gl.bfloat16:
        a, b = gl.inline_asm_elementwise(
            CODE, "=h,=h,r", [p], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        a, b = gl.inline_asm_elementwise(
            CODE, "=h,=h,r", [p], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.convert_layout(gl.join(a, b).reshape([64, 2 * p.shape[1]]), L, assert_trivial=True)


# --- the accumulator and the end --------------------------------------------------------------------


@gluon.constexpr_function
def rescale_assembly(n):
    alpha = [f"${2 * n + i}" for i in range(n)]
    lines = [
        "{",
        ".reg .pred needed;",
        f"setp.neu.f32 needed, {alpha[0]}, {ONE.value};",
        f"setp.neu.or.f32 needed, {alpha[2]}, {ONE.value}, needed;",
        "vote.sync.any.pred needed, needed, 0xffffffff;",
        "@!needed bra.uni DONE;",
        *(f"mul.f32 ${i}, ${i}, {alpha[i]};" for i in range(n)),
        "DONE:",
        "}",
    ]
    return "\n".join(lines)


@gluon.constexpr_function
def rescale_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescaled(acc, alpha):
    """acc [64, D] * alpha [64, 4]; warps whose rows all have alpha 1 skip it."""
    N: gl.constexpr = acc.shape[1] // 2
    CODE: gl.constexpr = rescale_assembly(N)
    OPERANDS: gl.constexpr = rescale_constraints(N)
    return gl.inline_asm_elementwise(
        CODE, OPERANDS, [acc, spread(alpha, acc)], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.jit
def softmax_finish(shift, l, R: gl.constexpr):
    """Returns (lse, 1 / l) [64] in layout R."""
    l = gl.convert_layout(gl.sum(l, 1), R)
    shift = gl.convert_layout(gl.max(shift, 1), R)
    return online_softmax_finish(-shift, l, 1.0)


@gluon.jit
def softmax_with_sink(shift, l, sink, R: gl.constexpr):
    """As softmax_finish, with one more score `sink` that has no value."""
    l = gl.convert_layout(gl.sum(l, 1), R)
    shift = gl.convert_layout(gl.max(shift, 1), R)
    m, l, weight, _ = online_softmax_merge(-shift, l, sink * LOG2E, 1.0, 1.0)
    lse, normaliser = online_softmax_finish(m, l, 1.0)
    return lse, weight * normaliser
