"""Makes Triton's interpreter several times as fast, for the tests; what it computes is the same.

When a kernel is launched the interpreter replaces the functions of triton.language by its own, and once
more when it calls a device function, which finds all but nothing left to replace.  Here the looking is
done once for each module, and calls in a launch that has replaced what they use replace nothing.

Tiles are small, so that most of what is left is the making of Python objects.  Here the fields of a
type and of a tile are made once for each shape, and what has no effect is left out.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NEEDED = {
    interpreter: ("_patch_lang", "_patch_builtin", "_LangPatchScope", "_get_np_dtype"),
    TritonSemantic: (
        "broadcast_impl_value", "binary_op_type_checking_impl", "binary_op_sanitize_overflow_impl",
    ),
}  # fmt: skip
PLAIN = ("int32", "int64", "fp32", "fp64")  # two of one of these give this one again

replaced: set[Any] = set()  # modules whose functions are the interpreter's now; none between launches


@functools.cache
def builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in builtins(package):
        member = getattr(package, name)
        if language.core.is_builtin(member):
            scope.set_attr(package, name, interpreted(member))


@functools.cache
def interpreted(member: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return call


@functools.cache
def modules_of(function: Any) -> frozenset[Any]:
    known = (language, language.core)
    return frozenset(x for x in function.__globals__.values() if any(x is module for module in known))


def sizes(shape: Any) -> tuple[Any, ...]:
    """A shape's numbers, of whatever kind of sequence of numbers or constants it is."""
    return tuple([x.value if isinstance(x, core.constexpr) else x for x in shape])


def cache_types() -> None:
    """block_type and tensor take the fields that follow from an element type and a shape from the first
    of their kind."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    of_scalars: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = sizes(shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), numbers
        if key not in of_types:
            make_type(self, element_ty, shape)
            self.shape = shapes.setdefault(numbers, self.shape)
            of_types[key] = {**self.__dict__, "of_tensors": {}}  # which tensors of this type share
        self.__dict__.update(of_types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        fields = type.__dict__.setdefault("of_tensors", {}) if type.is_block() else of_scalars
        if not fields:
            make_tensor(self, handle, type)
            own = ("handle", "type", "dtype")
            fields.update({k: v for k, v in self.__dict__.items() if k not in own})
        self.__dict__.update(fields)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def skip_conversions() -> None:
    """Operands of the same type and shape need no conversion to a common one."""
    broadcast, check = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        x, y = lhs.type, rhs.type
        if getattr(x, "shape", None) is getattr(y, "shape", None):  # cache_types has one of each
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)
        if tensors and lhs.dtype.name in PLAIN and lhs.dtype.name == rhs.dtype.name:
            return broadcast_impl_value(self, lhs, rhs)
        return check(self, lhs, rhs, *args, **kwargs)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl


def skip_overflow_checks() -> None:
    """Triton computes whether integers overflow, and ignores the result unless `debug` is set."""
    refuse = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            refuse(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def cache_numpy_types() -> None:
    """Triton makes a dictionary of all types each time that it wants NumPy's type of one."""
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = get_np_dtype


def install() -> None:
    """Does nothing where this Triton's interpreter is another."""
    if not all(hasattr(owner, name) for owner, names in NEEDED.items() for name in names):
        return
    cache_types()
    skip_conversions()
    skip_overflow_checks()
    cache_numpy_types()
    patch_lang = interpreter._patch_lang

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if not replaced:
            scope = Launch()
            scope._changes = patch_lang(function)._changes
            replaced.update(modules)
            return scope
        if not modules <= replaced:
            replaced.update(modules)
            return patch_lang(function)
        return interpreter._LangPatchScope()

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
