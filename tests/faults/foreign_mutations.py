"""Random changes to checkpoints of other projects, which know JSON, pickles, archives and safetensors."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.faults.mutations import change_json

__all__ = ["damage", "restructure"]

_MOST_TEXT = 3000
_NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 7, 255, 2**31, 2**53, 2**62, 2**63, 1 << 200, 1 << 20_000)


def damage(path: Path, random: Random) -> None:
    """Changes the bytes of a file as a failing disk or a cut would: checksums in it stay as they were."""
    data = bytearray(path.read_bytes())
    kind = random.choice(["flip", "flip", "flip", "zeros", "cut", "longer", "empty", "shifted", "missing"])
    if kind == "missing":
        path.unlink()
        return
    at = random.randrange(len(data) + 1)
    if kind == "flip" and data:
        data[min(at, len(data) - 1)] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "cut":
        del data[at:]
    elif kind == "longer":
        data += bytes(random.choice([1, 64, 5000]))
    elif kind == "empty":
        data.clear()
    elif kind == "shifted":
        data[at:at] = b"\0"
    path.write_bytes(data)


def restructure(path: Path, random: Random) -> None:
    """Changes what a file says, with lengths and checksums that fit. Damages a file of an unknown kind."""
    data = path.read_bytes()
    for change in (_archive, _pickle, _json, _safetensors):
        changed = change(data, random)
        if changed is not None and changed != data:
            path.write_bytes(changed)
            return
    damage(path, random)


def _json(data: bytes, random: Random) -> bytes | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    if not isinstance(value, (dict, list)) or not value:
        return None
    change_json(value, random)
    return json.dumps(value).encode()


def _safetensors(data: bytes, random: Random) -> bytes | None:
    length = int.from_bytes(data[:8], "little")
    header = _json(data[8 : 8 + length], random) if 0 < length < len(data) else None
    return None if header is None else len(header).to_bytes(8, "little") + header + data[8 + length :]


def _archive(data: bytes, random: Random) -> bytes | None:
    """An archive of torch.save with another pickle, or other records."""
    if not data.startswith(b"PK\x03\x04"):
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return None
    names = [name for name, _ in records]
    if random.random() < 0.8:
        records = [
            (name, (_pickle(raw, random) or raw) if name.endswith("/data.pkl") else raw)
            for name, raw in records
        ]
    else:
        at = random.randrange(len(records))
        name, raw = records[at]
        records[at] = random.choice(
            [(name, raw[:-1]), (name, raw * 2), (random.choice(names), raw), (name, b"")]
        )
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, raw in records:
            archive.writestr(zipfile.ZipInfo(name), raw)
    return written.getvalue()


def _pickle(data: bytes, random: Random) -> bytes | None:
    """A pickle with other opcodes or arguments."""
    try:
        found = [(opcode, at) for opcode, _, at in pickletools.genops(data)]
    except Exception:  # it is none
        return None
    ends = [at for _, at in found[1:]] + [found[-1][1] + 1]
    parts = [data[at:end] for (_, at), end in zip(found, ends, strict=True)]
    names = [opcode.name for opcode, _ in found]
    rest = data[ends[-1] :]
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        at = random.randrange(1, max(len(parts) - 1, 2))
        if at >= len(parts):
            return None
        random.choice(_PICKLE_CHANGES)(parts, names, at, random)
    return b"".join(parts) + rest


def _number(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    """Replaces the next number."""
    at = next((row for row in range(at, len(parts)) if row < len(names) and "INT" in names[row]), at)
    value = random.choice(_NUMBERS)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    parts[at] = b"\x8b" + struct.pack("<i", len(raw)) + raw


def _text(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    """Replaces the next text, or by another text of the pickle."""
    rows = [row for row in range(min(len(parts), len(names))) if "UNICODE" in names[row]]
    if not rows:
        return
    row = random.choice(rows)
    value = random.choice([b"", b"a\nb", b"../x", b"a" * _MOST_TEXT, "\u202e".encode(), b"0", b"state"])
    parts[row] = random.choice([parts[random.choice(rows)], b"X" + struct.pack("<I", len(value)) + value])


def _value(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    parts[at] = random.choice(
        [b"N", b"\x88", b"]", b"}", b")", b"\x8f", b"K\x01", b"C\x01a", b"G" + b"\x7f\xf8" * 4]
    )


def _doubled(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    """Inserts a value that holds the former twice, many times."""
    parts[at] += random.choice([b"", b"0]", b"0}", b"0)"]) + b"2\x86" * random.choice([1, 28, 28, 300])


def _dropped(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    parts[at] = b""


def _repeated(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    parts[at] *= random.choice([2, 3, 1000])


def _swapped(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    other = random.randrange(1, len(parts))
    parts[at], parts[other] = parts[other], parts[at]


def _reference(parts: list[bytes], names: list[str], at: int, random: Random) -> None:
    parts[at] = b"h" + bytes([random.randrange(60)])


_Change = Callable[[list[bytes], list[str], int, Random], None]
_PICKLE_CHANGES: list[_Change] = [
    _number, _number, _number, _text, _text, _value, _doubled, _doubled, _dropped, _repeated, _swapped,
    _reference,
]  # fmt: skip
