"""A small machine for pickles, which are programs that may call anything: this one knows tensors, containers and plain
values, and refuses every other class by name before anything is called."""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle3_jax.data.torch_tensors import DTYPES, Refusal, Storage, checked, rebuild, rebuild_v3

_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}
_MAX_COPIED = 1 << 24  # elements that calls may copy


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":  # how protocol 2 writes bytes
        raise ValueError("bytes in another encoding than latin1")
    return checked(text, str).encode(encoding)


def _device(*place: Any) -> str:
    if any(type(part) not in (str, int) for part in place):
        raise TypeError("a device that is no name and number")
    return ":".join(map(str, place))


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    items = list(pairs.items() if isinstance(pairs, dict) else pairs)
    return _pairs([part for item in items for part in _checked_pair(item)])


def _checked_pair(item: Any) -> Any:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError("a dict of what are no pairs")
    return item


# What a pickle may call, with what is called in its stead. Data (dtypes, storage classes) is not callable.
_CALLS: dict[str, Callable] = {
    "torch._utils._rebuild_tensor": rebuild,
    "torch._utils._rebuild_tensor_v2": rebuild,
    "torch._utils._rebuild_tensor_v3": rebuild_v3,
    "torch._utils._rebuild_parameter": lambda data, requires_grad, hooks: data,
    "torch.Size": tuple,
    "torch.device": _device,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "builtins.set": lambda items=(): set(_keys(items)),
    "__builtin__.set": lambda items=(): set(_keys(items)),
    "_codecs.encode": _encode,
}


@dataclass(frozen=True)
class GlobalName:
    """A name the pickle mentions: a function it may call, a dtype or a storage class."""

    name: str
    value: Any


def new_storage(storage_class: Any, items: Any, read: Callable[[], bytes]) -> Storage:
    """The storage of `items` elements that a pickle describes. Raises ValueError or TypeError for what is none."""
    dtype = checked(storage_class, GlobalName).value
    if not isinstance(dtype, np.dtype) or type(items) is not int or items < 0:
        raise ValueError("a storage of no length")
    return Storage(dtype, items, read)


def _find(module: str, name: str) -> Any:
    full = f"{module}.{name}"
    if full in _CALLS:
        return GlobalName(full, _CALLS[full])
    if module in ("torch", "torch.storage") and name in _STORAGES:
        return GlobalName(full, DTYPES[_STORAGES[name]])
    if module == "torch" and (dtype := DTYPES.get(name)) is not None:
        return dtype
    raise Refusal(f"it holds a {full}")


_MARK = object()
_PUSH = frozenset(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
    + ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
    + ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}


def run_pickle(stream: io.BytesIO, persistent: Callable[[tuple], Storage] | None) -> Any:
    """Runs one pickle and leaves the stream behind it. persistent: makes storages from their identifying tuples."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    copied = 0

    def pop_mark() -> list[Any]:
        place = len(stack) - 1
        while stack[place] is not _MARK:  # from the top, so that many marks take no longer than their items
            place -= 1
        items = stack[place + 1 :]
        del stack[place:]
        return items

    for opcode, argument, _ in pickletools.genops(stream):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                stack.append(_MARK)
            case "POP":
                stack.pop()
            case "POP_MARK":
                pop_mark()
            case "DUP":
                stack.append(stack[-1])
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _PUSH:
                stack.append(argument)
            case name if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "LIST":
                stack.append(pop_mark())
            case "DICT":
                stack.append(_pairs(pop_mark()))
            case "FROZENSET":
                stack.append(frozenset(_keys(pop_mark())))
            case "APPEND":
                item = stack.pop()
                checked(stack[-1], list).append(item)
            case "APPENDS":
                items = pop_mark()
                checked(stack[-1], list).extend(items)
            case "ADDITEMS":
                items = pop_mark()
                checked(stack[-1], set).update(_keys(items))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                checked(stack[-1], dict).update(_pairs([key, value]))
            case "SETITEMS":
                items = pop_mark()
                checked(stack[-1], dict).update(_pairs(items))
            case "GLOBAL":
                stack.append(_find(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_find(module, name))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, GlobalName) or function.name not in _CALLS:
                    raise Refusal(f"it calls {getattr(function, 'name', type(function).__name__)!r}")
                copied += sum(len(part) for part in arguments if isinstance(part, _SIZED))
                if copied > _MAX_COPIED:
                    raise Refusal("its calls copy the same data over and over")
                stack.append(function.value(*arguments))
            case "BUILD":
                stack.pop()  # attributes of an OrderedDict: torch keeps version numbers there
                checked(stack[-1], dict)
            case "BINPERSID":
                if persistent is None:
                    raise ValueError("a storage where none can be")
                stack.append(persistent(checked(stack.pop(), tuple)))
            case name:
                raise Refusal(f"it uses the pickle operation {name}")
    raise EOFError("the pickle has no end")


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(_keys(items[::2]), items[1::2], strict=True))


_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


def _keys(items: Any) -> Any:
    """Items that may be hashed: tuples of tuples take forever, and so do large integers chosen to collide."""
    for item in items:
        if item is not None and (type(item) not in (str, int, bool) or (type(item) is int and item.bit_length() > 60)):
            raise Refusal("a dict or set has other keys than strings, integers and None")
    return items
