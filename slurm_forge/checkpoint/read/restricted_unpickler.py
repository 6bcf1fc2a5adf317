"""A pickle reader that can build a handful of plain values and do nothing else.

A pickle is a program.  Forbidding names is not enough: BUILD changes its target, even a class; a
few bytes can request gigabytes of memo; tuples doubled sixty times never finish hashing.  So this
reader has only the instructions that an index needs, restricted to the types that need them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from typing import Any, ClassVar

#: The instructions in pickles of dataclasses, enums, numbers, texts, tuples, lists and dicts.
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT",
    "DICT", "SETITEM", "SETITEMS", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET",
    "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD",
)  # fmt: skip
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
#: An index has tuples of sizes inside a path inside arguments.
_DEEPEST = 4

# The implementation in Python: its instructions are a table, and its memo is a dict.
_Plain: Any = pickle._Unpickler


class _Restricted(_Plain):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, name)[0]: _Plain.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def __init__(
        self,
        data: bytes,
        find: Callable[[str, str], Any],
        buildable: Collection[type],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._find, self._buildable = find, buildable

    def find_class(self, module: str, name: str) -> Any:
        return self._find(module, name)

    def load_build(self) -> None:
        if type(self.stack[-2]) not in self._buildable:
            raise pickle.UnpicklingError("it changes an object that it does not own")
        _Plain.load_build(self)

    dispatch[pickle.BUILD[0]] = load_build


def _shallow(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def checked(self: Any) -> None:
        load(self)
        if _depth(self.stack[-1]) > _DEEPEST:
            raise pickle.UnpicklingError("it nests tuples too deep")

    return checked


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, tuple) else 0


for _name in _TUPLES:
    _code = getattr(pickle, _name)[0]
    _Restricted.dispatch[_code] = _shallow(_Plain.dispatch[_code])


def read_restricted(
    data: bytes, *, find: Callable[[str, str], Any], buildable: Collection[type]
) -> Any:
    """Read a pickle.  ``find(module, name)`` resolves the permitted names and raises for others.

    ``buildable`` are the types whose instances may be given a state.  Raises almost any exception
    for damaged or forbidden input; by then only ``find`` has been called, and nothing was changed.
    """
    try:
        return _Restricted(data, find, buildable).load()
    except KeyError as error:
        raise pickle.UnpicklingError(f"instruction {error} is not allowed there") from error
