"""Pickles without unpickling: a bounded interpreter of opcodes that builds inert values only.

Source of the opcodes: CPython, Lib/pickletools.py. What the pickle names (a class, a function)
becomes a :class:`Global`, two strings; what it calls an :class:`Applied`, a record of the call.
Nothing is imported, looked up or called, whatever the bytes say.

Invariants
- An opcode that is not in the table ends the reading. Extensions and buffers out of band are not
  understood, which proves nothing; every other one is damage.
- Steps and the memory of everything built are counted and limited; each opcode costs a bounded
  time, or one that its own bytes pay for.
- Values may contain themselves, as pickles can: who walks them limits the depth.
"""

from __future__ import annotations

import codecs
import dataclasses
import struct
from collections.abc import Callable

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError


@dataclasses.dataclass(frozen=True, slots=True)
class Global:
    """A class or function by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(slots=True, eq=False)
class Applied:
    """A call that was not made: ``function(*arguments)``, and what would have been put into it."""

    function: object
    arguments: object
    state: object = None
    items: list[tuple[object, object]] = dataclasses.field(default_factory=list)
    elements: list[object] = dataclasses.field(default_factory=list)

    @property
    def called(self) -> str:
        return str(self.function) if isinstance(self.function, Global) else ""


@dataclasses.dataclass(slots=True, eq=False)
class Pairs:
    """A dictionary as it was written: keys need not be hashable here."""

    items: list[tuple[object, object]] = dataclasses.field(default_factory=list)
    _named: dict[str, object] | None = None

    @property
    def named(self) -> dict[str, object]:
        """What is under text keys, the last of each. Made once: many may share a large one."""
        if self._named is None:
            self._named = {key: value for key, value in self.items if isinstance(key, str)}
        return self._named

    def get(self, key: str) -> object:
        """The value under a text key; None: there is none."""
        return self.named.get(key)

    def has(self, key: str) -> bool:
        return key in self.named


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """What the pickle's reader would have been asked for by this id."""

    id: object


_COST = {"list": 72, "pairs": 136, "applied": 232, "other": 48, "slot": 8}
"""Bytes that CPython 3.11 takes for each, measured with sys.getsizeof and rounded up."""


class Unpickled:
    """The value of one pickle, and where the bytes after it begin."""

    __slots__ = ("end", "value")

    def __init__(self, value: object, end: int) -> None:
        self.value = value
        self.end = end


def read_pickle(data: bytes, offset: int = 0) -> Unpickled:
    """Interpret the pickle that begins at ``offset``.

    Raises IncompleteError (it goes on behind the end of ``data``), DamagedError, BeyondLimitsError.
    """
    return _Machine(data, offset).run()


class _Machine:
    """The stack, the memo, and one method for each kind of opcode."""

    __slots__ = ("_at", "_data", "_marks", "_memo", "_memory", "_stack")

    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._at = offset
        self._stack: list[object] = []
        self._marks: list[list[object]] = []
        self._memo: dict[int, object] = {}
        self._memory = limits.PICKLE_MEMORY_BYTES_MAX

    def run(self) -> Unpickled:
        data, actions = self._data, _ACTIONS
        try:
            for _ in range(limits.PICKLE_STEPS_MAX):
                code = data[self._at]
                self._at += 1
                if code == _STOP:
                    return Unpickled(self._pop(), self._at)
                action = actions[code]
                if action is None:
                    raise self._no_action(code)
                action(self)
        except IndexError as error:
            raise self._torn(error) from error
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise DamagedError(f"the pickle is wrong at byte {self._at}") from error
        raise BeyondLimitsError("the pickle has more steps than are read")

    def _no_action(self, code: int) -> Exception:
        words = f"the pickle has an opcode {code:#04x} at {self._at - 1}"
        return BeyondLimitsError(words) if code in _NOT_UNDERSTOOD else DamagedError(words)

    def _torn(self, error: IndexError) -> Exception:
        if self._at >= len(self._data):
            return IncompleteError("its pickle was not written to its end")
        return DamagedError(f"the pickle is wrong at byte {self._at}: {error}")

    # --- bytes and the stack ----------------------------------------------------------------

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if length < 0 or end > len(self._data):
            self._at = len(self._data)
            raise IndexError("beyond the end")
        piece = self._data[self._at : end]
        self._at = end
        self._spend(length)
        return piece

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            self._at = len(self._data)
            raise IndexError("a line has no end")
        piece = self._data[self._at : end]
        self._at = end + 1
        return piece

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _spend(self, size_bytes: int) -> None:
        self._memory -= size_bytes
        if self._memory < 0:
            raise BeyondLimitsError("the pickle builds more than is read")

    def _push(self, value: object, cost: int = _COST["other"]) -> None:
        self._spend(cost)
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack:
            raise DamagedError(f"the pickle is wrong at byte {self._at}: its stack is empty")
        return self._stack.pop()

    def _top(self) -> object:
        if not self._stack:
            raise DamagedError(f"the pickle is wrong at byte {self._at}: its stack is empty")
        return self._stack[-1]

    def _pop_mark(self) -> list[object]:
        if not self._marks:
            raise DamagedError(f"the pickle is wrong at byte {self._at}: it has no mark")
        above = self._stack
        self._stack = self._marks.pop()
        return above

    # --- what opcodes do --------------------------------------------------------------------

    def mark(self) -> None:
        self._spend(_COST["list"])
        self._marks.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def duplicate(self) -> None:
        self._push(self._top(), _COST["slot"])

    def put(self, index: int) -> None:
        if index not in self._memo:
            self._spend(100)  # a place in a dictionary, and its key
        self._memo[index] = self._top()

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        if index not in self._memo:
            raise DamagedError(f"the pickle is wrong at byte {self._at}: nothing is kept there")
        self._push(self._memo[index], _COST["slot"])

    def frame(self) -> None:
        self._take_ahead(self._number(8))

    def _take_ahead(self, length: int) -> None:
        if self._at + length > len(self._data):
            self._at = len(self._data)
            raise IndexError("the frame goes on behind the end")

    def protocol(self) -> None:
        if self._take(1)[0] > 5:
            raise BeyondLimitsError("the pickle is of a protocol that is not known")

    def string(self, size: int, *, binary: bool = False) -> None:
        piece = self._take(self._number(size))
        if binary:
            self._push(piece)
        else:
            self._push(piece.decode("utf-8", "surrogatepass"))

    def old_string(self, size: int) -> None:
        self._push(self._take(self._number(size)).decode("latin-1"))

    def quoted(self) -> None:
        piece = self._line()
        if len(piece) < 2 or piece[:1] not in (b"'", b'"') or piece[-1:] != piece[:1]:
            raise DamagedError(f"the pickle is wrong at byte {self._at}: a string has no quotes")
        self._push(piece[1:-1].decode("latin-1"), len(piece) + _COST["other"])

    def raw_text(self) -> None:
        piece = self._line()
        text, _ = codecs.raw_unicode_escape_decode(piece)  # by name it would be a module to load
        self._push(text, 4 * len(piece) + _COST["other"])

    def long(self, size: int) -> None:
        length = self._number(size)
        self._push(int.from_bytes(self._take(length), "little", signed=True))

    def decimal(self) -> None:
        piece = self._line().removesuffix(b"L")
        booleans: dict[bytes, object] = {b"00": False, b"01": True}
        self._push(booleans.get(piece) if piece in booleans else int(piece))

    def decimal_long(self) -> None:
        self._push(int(self._line().removesuffix(b"L")))

    def float_line(self) -> None:
        self._push(float(self._line()))

    def float_binary(self) -> None:
        self._push(struct.unpack(">d", self._take(8))[0])

    def integer(self, size: int, *, signed: bool = False) -> None:
        self._push(int.from_bytes(self._take(size), "little", signed=signed))

    def tuple_of(self, count: int | None) -> None:
        items = self._pop_mark() if count is None else [self._pop() for _ in range(count)][::-1]
        self._push(tuple(items), 56 + _COST["slot"] * len(items))

    def list_of_mark(self) -> None:
        self._push(self._pop_mark(), _COST["list"])

    def pairs_of_mark(self) -> None:
        pairs = Pairs()
        self._fill(pairs.items, self._pop_mark())
        self._push(pairs, _COST["pairs"])

    def set_of_mark(self) -> None:
        self._push(self._pop_mark(), _COST["list"])

    def _fill(self, items: list[tuple[object, object]], flat: list[object]) -> None:
        if len(flat) % 2:
            raise DamagedError(f"the pickle is wrong at byte {self._at}: a key has no value")
        self._spend(len(flat) // 2 * 72)
        items += zip(flat[::2], flat[1::2], strict=True)

    def append(self) -> None:
        value = self._pop()
        self._add([value])

    def appends(self) -> None:
        self._add(self._pop_mark())

    def _add(self, values: list[object]) -> None:
        target = self._top()
        self._spend(_COST["slot"] * len(values))
        if isinstance(target, list):
            target += values
        elif isinstance(target, Applied):
            target.elements += values
        else:
            raise self._no_target(target, "it appends to no list")

    def _no_target(self, target: object, words: str) -> Exception:
        """Of a plain value it is proven that it takes nothing."""
        is_plain = target is None or isinstance(target, int | float | str | bytes | tuple)
        error = DamagedError if is_plain else BeyondLimitsError
        return error(f"the pickle is wrong at byte {self._at}: {words}")

    def set_item(self) -> None:
        value = self._pop()
        self._set([self._pop(), value])

    def set_items(self) -> None:
        self._set(self._pop_mark())

    def _set(self, flat: list[object]) -> None:
        target = self._top()
        if not isinstance(target, Pairs | Applied):
            raise self._no_target(target, "it sets an item of none")
        self._fill(target.items, flat)

    def global_line(self) -> None:
        module = self._line().decode("utf-8", "surrogatepass")
        name = self._line().decode("utf-8", "surrogatepass")
        self._push(Global(module, name), len(module) + len(name) + 200)

    def global_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise DamagedError(f"the pickle is wrong at byte {self._at}: a class has no name")
        self._push(Global(module, name), 64)

    def apply(self) -> None:
        arguments = self._pop()
        self._push(Applied(self._pop(), arguments), _COST["applied"])

    def apply_keywords(self) -> None:
        self._pop()
        self.apply()

    def instance(self) -> None:
        arguments = tuple(self._pop_mark())
        module = self._line().decode("utf-8", "surrogatepass")
        name = self._line().decode("utf-8", "surrogatepass")
        self._push(Applied(Global(module, name), arguments), _COST["applied"])

    def instance_of_mark(self) -> None:
        items = self._pop_mark()
        if not items:
            raise DamagedError(f"the pickle is wrong at byte {self._at}: it makes nothing")
        self._push(Applied(items[0], tuple(items[1:])), _COST["applied"])

    def build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, Applied):
            target.state = state
        elif not isinstance(target, Global | Persistent | Pairs | list):
            raise self._no_target(target, "it gives a state to none")

    def persistent(self) -> None:
        self._push(Persistent(self._pop()))

    def persistent_line(self) -> None:
        piece = self._line()
        self._push(Persistent(piece.decode("ascii", "backslashreplace")), 64 + len(piece))


_STOP = ord(".")
_NOT_UNDERSTOOD = frozenset(b"\x82\x83\x84\x97\x98")
"""EXT1, EXT2, EXT4, NEXT_BUFFER, READONLY_BUFFER."""
_Action = Callable[[_Machine], None]


def _actions() -> list[_Action | None]:
    """By opcode."""
    m = _Machine
    named: dict[bytes, _Action] = {
        b"\x80": m.protocol,
        b"\x95": m.frame,
        b"(": m.mark,
        b"0": m.pop,
        b"1": lambda self: void(self._pop_mark()),
        b"2": m.duplicate,
        b"p": lambda self: self.put(int(self._line())),
        b"q": lambda self: self.put(self._number(1)),
        b"r": lambda self: self.put(self._number(4)),
        b"\x94": m.memoize,
        b"g": lambda self: self.get(int(self._line())),
        b"h": lambda self: self.get(self._number(1)),
        b"j": lambda self: self.get(self._number(4)),
        b"N": lambda self: self._push(None),
        b"\x88": lambda self: self._push(True),  # noqa: FBT003  a value, not a flag
        b"\x89": lambda self: self._push(False),  # noqa: FBT003  a value, not a flag
        b"I": m.decimal,
        b"L": m.decimal_long,
        b"F": m.float_line,
        b"G": m.float_binary,
        b"J": lambda self: self.integer(4, signed=True),
        b"K": lambda self: self.integer(1),
        b"M": lambda self: self.integer(2),
        b"\x8a": lambda self: self.long(1),
        b"\x8b": lambda self: self.long(4),
        b"V": m.raw_text,
        b"X": lambda self: self.string(4),
        b"\x8c": lambda self: self.string(1),
        b"\x8d": lambda self: self.string(8),
        b"S": m.quoted,
        b"T": lambda self: self.old_string(4),
        b"U": lambda self: self.old_string(1),
        b"B": lambda self: self.string(4, binary=True),
        b"C": lambda self: self.string(1, binary=True),
        b"\x8e": lambda self: self.string(8, binary=True),
        b"\x96": lambda self: self.string(8, binary=True),
        b")": lambda self: self._push(()),
        b"t": lambda self: self.tuple_of(None),
        b"\x85": lambda self: self.tuple_of(1),
        b"\x86": lambda self: self.tuple_of(2),
        b"\x87": lambda self: self.tuple_of(3),
        b"]": lambda self: self._push([], _COST["list"]),
        b"l": m.list_of_mark,
        b"a": m.append,
        b"e": m.appends,
        b"}": lambda self: self._push(Pairs(), _COST["pairs"]),
        b"d": m.pairs_of_mark,
        b"s": m.set_item,
        b"u": m.set_items,
        b"\x8f": lambda self: self._push([], _COST["list"]),
        b"\x90": m.appends,
        b"\x91": m.set_of_mark,
        b"c": m.global_line,
        b"\x93": m.global_stack,
        b"R": m.apply,
        b"\x81": m.apply,
        b"\x92": m.apply_keywords,
        b"i": m.instance,
        b"o": m.instance_of_mark,
        b"b": m.build,
        b"Q": m.persistent,
        b"P": m.persistent_line,
    }
    return [named.get(bytes([code])) for code in range(256)]


def void(_value: object) -> None:
    """It is dropped."""


_ACTIONS = _actions()
