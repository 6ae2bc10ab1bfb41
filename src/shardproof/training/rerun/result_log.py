"""The log of rejected results: the step, the rank, the device and the attribution of each.

The log also stores the differences between two runs of a step (`Spread`), from which to choose a tolerance.
`Differences` counts them in bounded memory.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import torch

from shardproof._utils.arguments import unexpanded_home
from shardproof.engine.state import local_tensor
from shardproof.errors import FormatError

CORRECT_RESULT = "correct result"
"""The verdict on a result that another device reproduced: the cause is the data or the program."""

_NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}
_BINS_PER_OCTAVE = 8
_OCTAVES = 64
"""Octaves on either side of 1.0. Values beyond them count in the outermost bin."""
_LAST = _OCTAVES * _BINS_PER_OCTAVE
_SHOWN = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """One rejected result, with its verdict."""

    step: int
    rank: int
    node: str
    """Name of the node with the first run's device."""
    device: str
    """UUID of the device; "" for a CPU."""
    index: int
    """Index of the device on its node."""
    call: int
    """Position of the `validate` call in the step, from 0."""
    message: str
    """The message argument of the call."""
    first: float | int | str | None
    """The result of the first run: a number, or a text that describes a tensor."""
    second: float | int | str | None
    """The result of the run that decided; None if there was none."""
    verdict: str
    """"transient fault", "persistent fault" or "correct result"; or the text for an outside fault."""
    time: float
    """Time of the decision, in seconds since 1970."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of one validated value between two runs of a step, over many steps."""

    spread_of: str
    """The message argument of `validate`."""
    step: int
    """Number of decided steps."""
    rank: int
    count: int
    """Number of compared steps."""
    quantiles: dict[str, float | str]
    """Relative differences by name: "p50", "p90", "p99", "p99.9" and "max"."""
    time: float
    """Seconds since 1970."""


class ResultLog:
    """Appends rejected results to a file, one line of JSON each, durably.

    Only one process may write a log. Readers ignore a last line that a crash cut short, and the next append
    removes it.

    Args:
        path: path of the file. The first record creates the file and its folders.

    >>> import tempfile
    >>> log = ResultLog(Path(tempfile.mkdtemp()) / "rejected.jsonl")
    >>> log.append(Rejected(step=7, rank=3, node="n12", device="GPU-4f", index=1, call=0, message="loss",
    ...                     first=math.nan, second=math.nan, verdict=CORRECT_RESULT, time=1.8e9))
    >>> read_rejected(log.path)[0].first, steps_to_skip(log.path)
    (nan, {7})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if (fault := unexpanded_home(os.fspath(path))) is not None:
            raise ValueError(f"{path} cannot be the path of a log: {fault}")
        self.path = Path(path)

    def append(self, *records: Rejected | Spread) -> None:
        """Write the records and flush them to stable storage.

        Raises:
            OSError: the file cannot be written.
        """
        if not records:
            return
        text = ""
        for record in records:
            plain = msgspec.structs.asdict(record)
            if isinstance(record, Rejected):
                plain |= {"first": _text(record.first), "second": _text(record.second)}
            else:
                plain["quantiles"] = {name: _text(value) for name, value in record.quantiles.items()}
            text += json.dumps(plain, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        with self.path.open("a+b") as file:
            _drop_torn_line(file)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def read_rejected(path: str | os.PathLike[str]) -> list[Rejected]:
    """Read the rejected results of a log, oldest first. A missing file gives an empty list.

    Args:
        path: path of the log.

    Raises:
        FormatError: a complete line is not a record.

    >>> read_rejected("no/such.jsonl")
    []
    """
    return [
        msgspec.structs.replace(record, first=_number(record.first), second=_number(record.second))
        for record in _records(path)
        if isinstance(record, Rejected)
    ]


def read_spreads(path: str | os.PathLike[str]) -> list[Spread]:
    """Read the differences between runs from a log, oldest first. A missing file gives an empty list.

    Args:
        path: path of the log.

    Raises:
        FormatError: a complete line is not a record.

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
    """The steps with a rejected result that is correct. A later run may skip these steps.

    Args:
        path: path of the log.

    Raises:
        FormatError: a complete line is not a record.

    >>> steps_to_skip("no/such.jsonl")
    set()
    """
    return {record.step for record in read_rejected(path) if record.verdict == CORRECT_RESULT}


def shown_value(value: Any) -> float | int | str | None:
    """Convert a result for a record: a number stays, anything else becomes a short text.

    Args:
        value: a number, a tensor, an array, or an object with a repr. A tensor of one element is a number.

    >>> shown_value(torch.tensor(1.5)), shown_value(torch.tensor([1.0, math.nan, -3.0]))
    (1.5, 'float32 tensor of shape (3,), 1 not finite, largest magnitude 3')
    """
    if isinstance(value, torch.Tensor):
        local = local_tensor(value.detach())
        if local.numel() == 1:
            return shown_value(local.item())
        finite = local[local.isfinite()]
        largest = f"{float(finite.abs().max()):.6g}" if finite.numel() else "none"
        return (
            f"{str(local.dtype).removeprefix('torch.')} tensor of shape {tuple(local.shape)}, "
            f"{local.numel() - finite.numel()} not finite, largest magnitude {largest}"
        )
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        return shown_value(value.item())
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, int | float | str):
        return value
    return f"{value!r:.200}"


def _text(value: float | int | str | None) -> float | int | str | None:
    """Writes NaN and infinities, which JSON lacks, and integers that a double cannot hold, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, int) and abs(value) >= 2**53 else value


def _number(value: float | int | str | None) -> float | int | str | None:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


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
                "other lines do not depend on it",
                file=str(path),
            ) from error
    return found


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _drop_torn_line(file: BinaryIO) -> None:
    """Truncate the file after its last line end, to remove a record that a crash cut short."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(len(_whole_lines(file.read())))


class Differences:
    """The distribution of the differences between two runs of the same step.

    Zeros, infinities and the largest value are exact. Other values are counted in bins of equal width on a
    logarithmic scale, eight for each factor of two from 2^-64 to 2^64. So a quantile has an error of at most
    5 %, and there are at most 1,024 counters.

    >>> seen = Differences()
    >>> for difference in (0.0, 0.0, 0.0, 1e-7):
    ...     seen.add(difference)
    >>> seen.quantile(0.5), seen.quantile(1.0), seen.count
    (0.0, 1e-07, 4)
    >>> print(seen)
    4 compared, 1 differed: p50 0, p90 1.0e-07, p99 1.0e-07, p99.9 1.0e-07, max 1.0e-07
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of differences added."""
        self.zeros = 0
        """Number of differences that are 0.0: both runs gave the same result."""
        self.infinite = 0
        """Number of infinite differences, such as between NaN and a number."""
        self.largest = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, difference: float) -> None:
        """Count one difference.

        Raises:
            ValueError: the difference is negative or NaN.
        """
        if not difference >= 0.0:
            raise ValueError(f"a relative difference is a number from 0 up, not {difference}")
        self.count += 1
        self.largest = max(self.largest, difference)
        if difference == 0.0:
            self.zeros += 1
        elif math.isinf(difference):
            self.infinite += 1
        else:
            at = math.floor(math.log2(difference) * _BINS_PER_OCTAVE)
            self._bins[max(-_LAST, min(_LAST - 1, at))] += 1

    @property
    def differing(self) -> int:
        """Number of differences that are not 0.0."""
        return self.count - self.zeros

    def quantile(self, share: float) -> float:
        """The smallest difference d such that at least this share of the differences is <= d.

        Args:
            share: from 0.0 to 1.0.

        Returns:
            NaN if there are no differences.

        Raises:
            ValueError: `share` is out of range.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share is {share}, not a number from 0 to 1")
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(share * self.count))
        if rank == self.count:
            return self.largest
        passed = self.zeros
        if rank <= passed:
            return 0.0
        for index in sorted(self._bins):
            passed += self._bins[index]
            if rank <= passed:
                middle = float(2.0 ** ((index + 0.5) / _BINS_PER_OCTAVE))  # of the bin, on its scale
                return min(middle, self.largest)
        return math.inf

    def quantiles(self) -> dict[str, float]:
        """p50, p90, p99, p99.9 and max, by name."""
        return {name: self.quantile(share) for name, share in _SHOWN.items()} | {"max": self.quantile(1.0)}

    def merge(self, other: Differences) -> None:
        """Add the counts of another distribution, such as that of another rank."""
        self.count += other.count
        self.zeros += other.zeros
        self.infinite += other.infinite
        self.largest = max(self.largest, other.largest)
        self._bins.update(other._bins)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "count": self.count,
            "zeros": self.zeros,
            "infinite": self.infinite,
            "largest": self.largest,
            "bins": [[index, self._bins[index]] for index in sorted(self._bins)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved counts."""
        self.count = state["count"]
        self.zeros = state["zeros"]
        self.infinite = state["infinite"]
        self.largest = state["largest"]
        self._bins = Counter(dict(state["bins"]))

    def __str__(self) -> str:
        if not self.count:
            return "none compared"
        if not self.differing:
            return f"{self.count} compared, none differed"
        texts = {name: f"{value:.1e}" if value else "0" for name, value in self.quantiles().items()}
        shown = ", ".join(f"{name} {text}" for name, text in texts.items())
        return f"{self.count} compared, {self.differing} differed: {shown}"
