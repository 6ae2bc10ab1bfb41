"""Directories of zip archives: those of zipfile and of torch are read, and damage is a ValueError."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable

import pytest
import torch

from shardproof.formats.torch.archive_bytes import ZipRecord, read_zip_directory


def read(data: bytes) -> list[ZipRecord]:
    return read_zip_directory(lambda at, count: data[at : at + count], len(data))


def saved(*, force_zip64: bool = False) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (
            ("archive/data.pkl", b"abc"),
            ("archive/größe", b""),
            ("archive/data/0", b"x" * 99),
        ):
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=force_zip64) as record:
                record.write(content)
    return file.getvalue()


def of_torch() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.arange(5), "b": torch.zeros(2, 3)}, file)
    return file.getvalue()


@pytest.mark.parametrize("make", [saved, lambda: saved(force_zip64=True), of_torch])
def test_records_are_those_that_zipfile_finds(make: Callable[[], bytes]) -> None:
    data = make()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = [
            (
                entry.filename,
                entry.compress_type,
                entry.CRC,
                entry.compress_size,
                entry.file_size,
                entry.header_offset,
            )
            for entry in archive.infolist()
        ]
    assert [tuple(record) for record in read(data)] == expected


def test_sizes_and_places_of_zip64_are_in_the_extra_field() -> None:
    data = saved()
    begin = data.index(b"PK\x01\x02")
    large = 1 << 33
    record = bytearray(data[begin : data.index(b"PK\x01\x02", begin + 4)])
    record[20:28] = b"\xff" * 8  # both sizes
    record[30:32] = (24).to_bytes(2, "little")
    extra = (
        b"\x09\x00\x00\x00"
        + b"\x01\x00\x10\x00"
        + (large + 7).to_bytes(8, "little")
        + large.to_bytes(8, "little")
    )
    directory = bytes(record) + extra
    end = b"PK\x05\x06" + bytes(4) + b"\x01\x00" * 2 + len(directory).to_bytes(4, "little") + bytes(6)
    (found,) = read(directory + end)
    assert (found.nbytes, found.stored) == (large + 7, large)
    directory = directory.replace(b"\x01\x00\x10\x00", b"\x01\x00\x08\x00")
    with pytest.raises(ValueError, match=r"more than 4 GiB|longer"):
        read(directory + end)


def test_a_comment_and_a_cut_are_refused() -> None:
    data = saved()
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b"note"
    for damaged in (file.getvalue(), data[:-1], data[:10], b"", data + b"x", data[:-2] + b"\1\0"):
        with pytest.raises(ValueError, match=r"end record|comment"):
            read(damaged)


def test_a_directory_with_more_records_than_it_says_is_refused() -> None:
    data = bytearray(saved())
    end = data.index(b"PK\x05\x06")
    data[end + 8] = data[end + 10] = 2
    with pytest.raises(ValueError, match="more bytes than its records"):
        read(bytes(data))


@pytest.mark.parametrize("make", [saved, of_torch])
def test_every_changed_byte_is_an_error_or_other_records(make: Callable[[], bytes]) -> None:
    whole = make()
    begin = whole.index(b"PK\x01\x02")
    expected = read(whole)
    chosen = random.Random(0)
    refused = 0
    for at in range(begin, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chosen.randrange(8)
        try:
            found = read(bytes(damaged))
        except ValueError:
            refused += 1
        else:
            assert len(found) == len(expected)
    assert refused > 50
