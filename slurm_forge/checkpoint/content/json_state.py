"""Everything of a training state that is not a tensor, as JSON and back, without any loss.

Finite floats, ints, strings, booleans, None, lists and dicts with string keys are written as plain
JSON.  Other values are written as an object with one key that begins with ``$``.  The decoded value
equals the original in value and type; a value for which that can't be guaranteed is refused with
the path of its key.  Tensors are passed to the caller and leave a reference behind.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from slurm_forge.errors import CheckpointError
from slurm_forge.vocabulary.json_value import Json

_DEEPEST = 100
#: Longer ints are written in hexadecimal: Python refuses to read decimals above 4300 digits.
_DECIMAL_BITS = 4096
_LARGEST_ARRAY = 1 << 20
_NUMPY_KINDS = "biufc"

SaveTensor = Callable[[str, torch.Tensor], None]
FindTensor = Callable[[str], torch.Tensor]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``, as torch spells it without its own name."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name; ValueError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name[:40]!r}")
    return dtype


def escape(component: str) -> str:
    """One component of a key path; ``/`` separates components, so it is written ``%2F``."""
    return component.replace("%", "%25").replace("/", "%2F")


def unescape(component: str) -> str:
    """Undo ``escape``."""
    return component.replace("%2F", "/").replace("%25", "%")


def encode(value: object, path: str, save_tensor: SaveTensor | None = None) -> Json:
    """Return ``value`` as JSON; each tensor is passed to ``save_tensor(key, tensor)``.

    ``path`` is the place of the value and the prefix of its tensors' keys.  Raises CheckpointError,
    which names the path, for a value that can't be restored exactly.
    """
    return _encode(value, path, save_tensor, 0)


def decode(value: Json, find_tensor: FindTensor | None = None) -> Any:
    """Decode what ``encode`` returned; ``find_tensor(key)`` supplies the tensors.

    Raises ValueError for anything that ``encode`` can't have written.
    """
    if isinstance(value, list):
        return [decode(item, find_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, body, find_tensor)
    if any(key.startswith("$") for key in value):
        raise ValueError(f"unknown tag among {sorted(value)[:3]}")
    return {key: decode(item, find_tensor) for key, item in value.items()}


def _encode(value: object, path: str, save: SaveTensor | None, depth: int) -> Json:
    if depth > _DEEPEST:
        raise _refused(path, value, "it is nested too deep, or contains itself")
    if value is None or type(value) in (bool, str):
        return value  # type: ignore[return-value]
    if type(value) is int:
        return value if value.bit_length() <= _DECIMAL_BITS else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": _spell(value)}
    if isinstance(value, torch.Tensor):
        if save is None:
            raise _refused(path, value, "a tensor can't stand here")
        save(path, value)
        return {"$tensor": path}
    container = _encode_container(value, path, save, depth)
    if container is not _NOTHING:
        return container  # type: ignore[return-value]
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is complex:
        return {"$complex": [_encode(part, path, None, depth) for part in (value.real, value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    return _encode_numpy(value, path)


_NOTHING = object()


def _encode_container(value: object, path: str, save: SaveTensor | None, depth: int) -> object:
    def items(values: Any) -> list[Json]:
        return [
            _encode(item, f"{path}/{index}", save, depth + 1) for index, item in enumerate(values)
        ]

    kind = type(value)
    if kind is list:
        return items(value)
    if kind is tuple:
        return {"$tuple": items(value)}
    if kind is torch.Size:
        return {"$size": items(value)}
    if isinstance(value, dict) and kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {
                key: _encode(item, f"{path}/{escape(key)}", save, depth + 1)
                for key, item in value.items()
            }
        return {"$dict": _pairs(value, path, save, depth)}
    if kind is OrderedDict:
        return {"$ordered": _pairs(value, path, save, depth)}  # type: ignore[arg-type]
    if kind is Counter:  # MultiStepLR keeps its milestones in one
        return {"$counter": _pairs(value, path, save, depth)}  # type: ignore[arg-type]
    if kind in (set, frozenset):
        encoded = [_encode(item, f"{path}/*", None, depth + 1) for item in value]  # type: ignore[attr-defined]
        # Sorted, so that equal sets give equal manifests on every rank.
        return {"$set" if kind is set else "$frozenset": sorted(encoded, key=json.dumps)}
    return _NOTHING


def _pairs(value: dict[Any, Any], path: str, save: SaveTensor | None, depth: int) -> list[Json]:
    pairs: list[Json] = []
    for key, item in value.items():
        # A string key is used as it is; "int:1" can't meet the string "1" in the same path.
        name = escape(key) if type(key) is str else escape(f"{type(key).__name__}:{key!r}")
        pairs.append(
            [
                _encode(key, f"{path}/{name} (the key)", None, depth + 1),
                _encode(item, f"{path}/{name}", save, depth + 1),
            ]
        )
    return pairs


def _spell(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def _encode_numpy(value: object, path: str) -> Json:
    # Schedulers and metrics contain NumPy scalars; if NumPy is not imported there are none.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        dtype, kind = value.dtype, type(value)
        exact = isinstance(value, numpy.generic) or kind is numpy.ndarray
        if exact and dtype.kind in _NUMPY_KINDS and value.nbytes <= _LARGEST_ARRAY:
            body: list[Json] = [dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]
            if isinstance(value, numpy.generic):
                return {"$numpy": body}
            return {"$array": [*body, list(value.shape)]}
    raise _refused(path, value, "no exact way to store it")


def _decode_tagged(tag: str, body: Json, find: FindTensor | None) -> Any:
    if tag == "$tensor" and find is not None and isinstance(body, str):
        return find(body)
    if isinstance(body, str):
        return _decode_text(tag, body)
    if isinstance(body, list):
        return _decode_list(tag, body, find)
    raise ValueError(f"unknown tag {tag}")


def _decode_text(tag: str, body: str) -> Any:
    if tag == "$float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "$int":
        return int(body, 16)
    if tag == "$bytes":
        return base64.b64decode(body, validate=True)
    if tag == "$dtype":
        return dtype_named(body)
    if tag == "$device":
        try:
            return torch.device(body)
        except RuntimeError as error:
            raise ValueError(f"unknown device {body!r}") from error
    raise ValueError(f"unknown tag {tag} or value {body[:40]!r}")


def _decode_list(tag: str, body: list[Json], find: FindTensor | None) -> Any:
    if tag in ("$numpy", "$array"):
        return _decode_numpy(tag, body)
    if tag in ("$dict", "$ordered", "$counter"):
        pairs: list[tuple[Any, Any]] = []
        for pair in body:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"{tag} without pairs")
            pairs.append((decode(pair[0]), decode(pair[1], find)))
        if tag == "$counter":
            return Counter(dict(pairs))
        return dict(pairs) if tag == "$dict" else OrderedDict(pairs)
    items = [decode(item, find) for item in body]
    if tag == "$tuple":
        return tuple(items)
    if tag == "$size":
        return torch.Size(items)
    if tag == "$set":
        return set(items)
    if tag == "$frozenset":
        return frozenset(items)
    if tag == "$complex" and len(items) == 2:
        return complex(items[0], items[1])
    raise ValueError(f"unknown tag {tag}")


def _decode_numpy(tag: str, body: list[Json]) -> Any:
    import numpy

    dtype, data = body[0], body[1]
    if not isinstance(dtype, str) or not isinstance(data, str):
        raise ValueError(f"{tag} without text")
    kind = numpy.dtype(dtype)
    if kind.kind not in _NUMPY_KINDS:
        raise ValueError(f"{tag} of kind {kind.kind}")
    values = numpy.frombuffer(base64.b64decode(data, validate=True), dtype=kind)
    if tag == "$numpy":
        return values[0]
    shape: Any = body[2]
    return values.reshape(shape).copy()


def _refused(path: str, value: object, why: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return CheckpointError(
        f"{path}: a {kind} can't be saved: {why}",
        next_step="Let the object's state_dict() return tensors, numbers, strings, None, lists, "
        "tuples or dicts of these there, and rebuild the rest in load_state_dict().",
    )
