"""Dependent launches: a kernel launched with launch_pdl begins as soon as every program of the one
before has ended or called let_next_begin, and there is room.  When wait_for_launch_before returns,
those programs have ended, and what they wrote is visible.

Waiting for a launch, as the next ordinary launch does, waits for that launch alone.  So in each
dependent launch some program calls wait_for_launch_before.

(triton.language.extra.cuda has the two under the names gdc_launch_dependents and gdc_wait, which in
Triton 3.9 Gluon does not know.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_begin():
    """Let the next launch begin, as far as this program is concerned."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_launch_before():
    """Wait for the end of the launch before, and see what it has written."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
