"""The log of rejected results: what was rejected where, what it was found to be, and which steps to skip.

It also takes how much runs of one step differed (`Spread`), so that a tolerance can be chosen from it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import torch

from shardproof.errors import FormatError
from shardproof.state import local_tensor

__all__ = [
    "CORRECT_RESULT",
    "Rejected",
    "ResultLog",
    "Spread",
    "read_rejected",
    "read_spreads",
    "shown_value",
    "steps_to_skip",
]

CORRECT_RESULT = "correct result"
"""The verdict on a result that came out again on another device: the data or the program is to blame."""

_NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """One rejected result, with what it was found to be."""

    step: int
    rank: int
    node: str
    """Name of the machine of the first run's device."""
    device: str
    """UUID of that device; "" for a CPU."""
    index: int
    """Index of that device on its node."""
    call: int
    """Which call of `validate` in the step, from 0."""
    message: str
    """The text that the call was given."""
    first: float | int | str | None
    """What the first run gave: a number, or a text about a tensor."""
    second: float | int | str | None
    """What the run gave that decided; None where there was none."""
    verdict: str
    """"transient fault", "persistent fault" or "correct result"; another text for what came from outside."""
    time: float
    """When it was decided, in seconds since 1970."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How much one validated value differed between two runs of a step, over many steps."""

    spread_of: str
    """The text that `validate` was given."""
    step: int
    """Steps that had been decided."""
    rank: int
    count: int
    """Steps that were compared."""
    quantiles: dict[str, float | str]
    """Relative differences by name: "p50", "p90", "p99", "p99.9" and "max"."""
    time: float
    """Seconds since 1970."""


class ResultLog:
    """Appends rejected results to a file, one line of JSON each, durably.

    One process writes a log. A line that a crash cut short is no record: readers leave it out, and it is
    removed before the next one is written.

    Args:
        path: of the file. It and its folders are made with the first record.

    >>> import tempfile
    >>> log = ResultLog(Path(tempfile.mkdtemp()) / "rejected.jsonl")
    >>> log.append(Rejected(step=7, rank=3, node="n12", device="GPU-4f", index=1, call=0, message="loss",
    ...                     first=math.nan, second=math.nan, verdict=CORRECT_RESULT, time=1.8e9))
    >>> read_rejected(log.path)[0].first, steps_to_skip(log.path)
    (nan, {7})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def append(self, *records: Rejected | Spread) -> None:
        """Write the records and flush them to stable storage.

        Raises:
            OSError: the file cannot be written.
        """
        if not records:
            return
        text = "".join(json.dumps(_plain(record), allow_nan=False) + "\n" for record in records)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        with self.path.open("a+b") as file:
            _drop_torn_line(file)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            _flush_folder(self.path.parent)


def read_rejected(path: str | os.PathLike[str]) -> list[Rejected]:
    """The rejected results of a log, oldest first; none if there is no such file yet.

    Args:
        path: that was given to `ResultLog`.

    Raises:
        FormatError: a whole line is no record.

    >>> read_rejected("no/such.jsonl")
    []
    """
    return [
        msgspec.structs.replace(record, first=_number(record.first), second=_number(record.second))
        for record in _records(path)
        if isinstance(record, Rejected)
    ]


def read_spreads(path: str | os.PathLike[str]) -> list[Spread]:
    """How much runs differed, as a log has it, oldest first; none if there is no such file yet.

    Args:
        path: that was given to `ResultLog`.

    Raises:
        FormatError: a whole line is no record.

    >>> read_spreads("no/such.jsonl")
    []
    """
    return [
        msgspec.structs.replace(
            record,
            quantiles={name: cast(float, _number(value)) for name, value in record.quantiles.items()},
        )
        for record in _records(path)
        if isinstance(record, Spread)
    ]


def steps_to_skip(path: str | os.PathLike[str]) -> set[int]:
    """The steps whose rejected result was found to be correct: those that a later run may leave out.

    Args:
        path: that was given to `ResultLog`.

    Raises:
        FormatError: a whole line of the log is no record.

    >>> steps_to_skip("no/such.jsonl")
    set()
    """
    return {record.step for record in read_rejected(path) if record.verdict == CORRECT_RESULT}


def shown_value(value: Any) -> float | int | str | None:
    """What a record says of a result: a number as such, anything else as a short text.

    Args:
        value: a number, a tensor or an array (of one element: that number), or anything with a repr.

    >>> shown_value(torch.tensor(1.5)), shown_value(torch.tensor([1.0, math.nan, -3.0]))
    (1.5, 'float32 tensor of shape (3,), 1 not finite, largest magnitude 3')
    """
    if isinstance(value, torch.Tensor):
        local = local_tensor(value.detach())
        return shown_value(local.item()) if local.numel() == 1 else _outline(local)
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        return shown_value(value.item())
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, int | float | str):
        return value
    return f"{value!r:.200}"


def _outline(tensor: torch.Tensor) -> str:
    finite = tensor[tensor.isfinite()]
    largest = f"{float(finite.abs().max()):.6g}" if finite.numel() else "none"
    return (
        f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}, "
        f"{tensor.numel() - finite.numel()} not finite, largest magnitude {largest}"
    )


def _text(value: float | int | str | None) -> float | int | str | None:
    """JSON has no NaN and no infinities, and readers of large integers differ: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, int) and abs(value) >= 2**53 else value


def _number(value: float | int | str | None) -> float | int | str | None:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(record: Rejected | Spread) -> dict[str, Any]:
    plain = msgspec.structs.asdict(record)
    if isinstance(record, Rejected):
        return plain | {"first": _text(record.first), "second": _text(record.second)}
    return plain | {"quantiles": {name: _text(value) for name, value in record.quantiles.items()}}


def _records(path: str | os.PathLike[str]) -> list[Rejected | Spread]:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    found: list[Rejected | Spread] = []
    for number, line in enumerate(_whole_lines(data).splitlines(), start=1):
        kind: type[Rejected | Spread] = Spread if b'"spread_of"' in line[:16] else Rejected
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise FormatError(
                f"{path}, line {number} is not a rejected result ({error}). Correct or remove the line; the "
                "others are independent of it",
                file=str(path),
            ) from error
    return found


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off what is behind the last end of a line: of a record whose write was cut short."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(len(_whole_lines(file.read())))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
