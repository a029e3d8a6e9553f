"""Safetensors files parsed and assembled by hand, so that tests can make invalid ones."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

_NBYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class Tensors:
    """A header as JSON has it, and the bytes behind it."""

    header: dict
    data: bytes

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[str, list[int]]]) -> "Tensors":
        """Zeros of these kinds and shapes."""
        return cls.together(
            {
                name: (kind, shape, bytes(_NBYTES[kind] * math.prod(shape)))
                for name, (kind, shape) in shapes.items()
            }
        )

    @classmethod
    def together(cls, parts: Mapping[str, tuple[str, list[int], bytes]]) -> "Tensors":
        """Tensors from kind, shape and bytes by name, in this order."""
        header = {}
        data = b""
        for name, (kind, shape, raw) in parts.items():
            header[name] = {
                "dtype": kind,
                "shape": shape,
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
        return cls(header, data)

    def taken_apart(self) -> dict[str, tuple[str, list[int], bytes]]:
        """The inverse of `together`, without metadata."""
        entries = {name: entry for name, entry in self.header.items() if name != "__metadata__"}
        return {
            name: (entry["dtype"], entry["shape"], self.data[slice(*entry["data_offsets"])])
            for name, entry in entries.items()
        }


def parsed(file: bytes) -> Tensors:
    size = 8 + int.from_bytes(file[:8], "little")
    return Tensors(json.loads(file[8:size]), file[size:])


def joined(tensors: Tensors, text: str | None = None) -> bytes:
    """The bytes of the file; `text` replaces the header if given."""
    header = (text if text is not None else json.dumps(tensors.header)).encode(
        "utf-8", "surrogatepass"
    )
    return len(header).to_bytes(8, "little") + header + tensors.data
