"""One value that cannot be read is an error of its key alone: the rest of the file stays readable."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run
from shardproof.engine.foreign import foreign_of
from shardproof.errors import FormatError, KeyMismatchError, PlainDataError
from shardproof.formats.safetensors_files import dtype_of_code
from shardproof.report import describe, summarise
from shardproof.runs.maintenance import verify_any
from tests.unit.formats.peers import bits

WEIGHT = torch.arange(3.0)


def per_channel(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(4, 4), torch.full((4,), 0.1), torch.zeros(4), 0, dtype)


QUANTISED = {
    "torch.QInt8Storage": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "torch.QUInt8Storage": lambda: per_channel(torch.quint8),
    "torch.QInt32Storage": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint32),
    "torch.QUInt4x2Storage": lambda: per_channel(torch.quint4x2),
}
OTHERS = {
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "on the device meta": lambda: torch.empty(3, device="meta"),
    "torch.bits8": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "a storage without a tensor": lambda: torch.ones(3).untyped_storage(),
    "dtype object": lambda: np.array([{}, 1], dtype=object),
    "dtype datetime64": lambda: np.array(["2020-01-01"], "datetime64[D]"),
}


def check_that_only_one_key_is_an_error(path: Path, key: str, kind: str) -> None:
    """All the uses of a checkpoint with the readable tensor "w" and one unreadable value."""
    with sp.open(path) as checkpoint:
        assert checkpoint.keys() == sorted([key, "w"])
        assert bits(checkpoint["w"].read()) == bits(WEIGHT)
        with pytest.raises(PlainDataError, match=f"{key} is .*{kind}.*exclude="):
            checkpoint[key]
    target = {"w": torch.zeros(3)}
    sp.load(path, target, include="w")
    assert bits(target["w"]) == bits(WEIGHT)
    wanting = {"w": torch.zeros(3), key: torch.zeros(3)}
    with pytest.raises(KeyMismatchError, match=f"{key}: expected tensor float32 .*, found .*{kind}"):
        sp.load(path, wanting)
    report = verify_any(foreign_of(path))
    assert report.ok
    assert any(key in note and kind in note for note in report.notes)
    stored = describe(foreign_of(path))
    summary = summarise(
        path.name, stored.manifest, stored.table, format=stored.format, unreadable=stored.unreadable
    )
    assert (summary.tensors, summary.objects) == (1, ())
    assert kind in summary.unreadable[key]
    with pytest.raises(PlainDataError, match=f"{key} is .*{kind}"):
        sp.convert(path, path.parent / "all", to="shardproof")
    sp.convert(path, path.parent / "rest", to="shardproof", exclude=key)
    assert bits(sp.open(path.parent / "rest")["w"].read()) == bits(WEIGHT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", [*QUANTISED, *OTHERS])
def test_a_value_of_torch_save_that_cannot_be_read(tmp_path: Path, kind: str, is_zip: bool) -> None:
    value = {**QUANTISED, **OTHERS}[kind]()
    torch.save({"q": value, "w": WEIGHT}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    check_that_only_one_key_is_an_error(tmp_path / "a.pt", "q", kind)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_below_the_key_of_an_unreadable_value(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.eye(3).to_sparse(), "w.scale": WEIGHT, "b": WEIGHT}, path)
    with sp.open(path) as checkpoint:
        assert checkpoint.keys() == ["b", "w", "w.scale"]
    target = {"b": torch.zeros(3)}
    assert sp.load(path, target, strict=False).unexpected == ("w", "w.scale")
    assert bits(target["b"]) == bits(WEIGHT)
    assert run(["inspect", str(path)]) == 0
    with pytest.raises(PlainDataError, match="w is a sparse tensor.*exclude="):
        sp.convert(path, tmp_path / "all", to="shardproof")
    sp.convert(path, tmp_path / "rest", to="shardproof", exclude="w")
    assert sp.open(tmp_path / "rest").keys() == ["b"]


def test_keys_and_the_summary_of_another_format_read_no_plain_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": {"b": ([1], 2)}, "a.b.c": WEIGHT}, tmp_path / "a.pt")
    monkeypatch.setattr("shardproof.engine.loading.opening.encode_plain", None)
    with sp.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.keys() == ["a.b", "a.b.c"]
    assert run(["inspect", str(tmp_path / "a.pt")]) == 0


REMEDIES: dict[str, Callable[[Any], Any]] = {
    "dequantize": lambda value: value.dequantize(),
    "int_repr": lambda value: (value.int_repr(), value.q_scale(), value.q_zero_point()),
    "to_dense": lambda value: value.to_dense(),
    "unbind": lambda value: list(value.unbind()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedies_that_errors_name_help(tmp_path: Path, remedy: str) -> None:
    kind = {"to_dense": "a sparse tensor", "unbind": "a nested tensor"}.get(remedy, "torch.QInt8Storage")
    torch.save({"q": {**QUANTISED, **OTHERS}[kind]()}, tmp_path / "a.pt")
    with pytest.raises(PlainDataError, match=rf"torch\.load.*{remedy}\(\)"):
        sp.open(tmp_path / "a.pt")["q"]
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)  # noqa: TID251 the remedy
    torch.save({"q": REMEDIES[remedy](loaded["q"])}, tmp_path / "b.pt")
    with sp.open(tmp_path / "b.pt") as checkpoint:
        assert not checkpoint.reader.unreadable  # type: ignore[attr-defined]
        for key in checkpoint:
            checkpoint[key]


def test_quantised_tensors_in_lists_and_tuples_are_named(tmp_path: Path) -> None:
    quantised = QUANTISED["torch.QInt8Storage"]()
    torch.save({"list": [quantised], "pair": (quantised, 1), "w": WEIGHT}, tmp_path / "a.pt")
    with sp.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.keys() == ["list.0", "pair", "w"]
        for key in ("list.0", "pair"):
            with pytest.raises(PlainDataError, match=f"{key} is a quantised tensor"):
                checkpoint[key]


@pytest.mark.parametrize(
    ("code", "shape", "nbytes"),
    [("F6_E2M3", [4], 3), ("F6_E3M2", [8], 6), ("F4", [2, 3], 3), ("I4", [4], 2), ("F9", [4], 4)],
)
def test_a_safetensors_dtype_that_torch_lacks(
    tmp_path: Path, code: str, shape: list[int], nbytes: int
) -> None:
    """The header is made by hand, since the safetensors library for Python writes none of these."""
    header = {
        "w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "q": {"dtype": code, "shape": shape, "data_offsets": [12, 12 + nbytes]},
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + WEIGHT.numpy().tobytes() + bytes(nbytes)
    (tmp_path / "a.safetensors").write_bytes(data)
    check_that_only_one_key_is_an_error(tmp_path / "a.safetensors", "q", f"dtype {code}")
    (tmp_path / "a.safetensors").write_bytes(data + b"0")
    with pytest.raises(FormatError, match="is another file"):
        sp.open(tmp_path / "a.safetensors")


def test_a_tie_to_a_safetensors_dtype_that_torch_lacks(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"shardproof:aliases": '{"tied": "q", "v": "w"}'},
        "w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "q": {"dtype": "F9", "shape": [4], "data_offsets": [12, 16]},
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + WEIGHT.numpy().tobytes() + bytes(4)
    (tmp_path / "a.safetensors").write_bytes(data)
    with sp.open(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.keys() == ["q", "tied", "v", "w"]
        assert bits(checkpoint["v"].read()) == bits(WEIGHT)
        with pytest.raises(PlainDataError, match="tied is .*F9"):
            checkpoint["tied"]


def test_only_dtypes_of_this_torch_are_read() -> None:
    """Torch 2.6 lacks float8_e8m0fnu and float4_e2m1fn_x2."""
    for code in ("F8_E8M0", "F4", "F8_E4M3"):
        found = dtype_of_code(code, (4,))
        assert found is None or hasattr(torch, found[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_every_pickle_protocol_is_read(tmp_path: Path, protocol: int, is_zip: bool) -> None:
    torch.save(
        {"w": WEIGHT, "o": {"a": [1, 2.5]}},
        tmp_path / "a.pt",
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=is_zip,
    )
    with sp.open(tmp_path / "a.pt") as checkpoint:
        assert bits(checkpoint["w"].read()) == bits(WEIGHT)
        assert checkpoint["o.a"] == [1, 2.5]


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_pickle_protocol_0_is_refused_by_name(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": WEIGHT}, path, pickle_protocol=0, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(Exception, match=r"."):
        torch.load(path)  # noqa: TID251 torch refuses it too
    with pytest.raises(FormatError, match="pickle_protocol=0"):
        sp.open(path)


def test_arrays_of_texts_are_read_without_trust(tmp_path: Path) -> None:
    values = {
        "texts": np.array([["a", "b\u00fcc"], ["", "\U0001f600"]]),
        "bytes": np.array([b"a", b"\xff\x00b"]),
        "long": np.array(["x" * 50] * 40),
        "one": np.array("x"),
    }
    torch.save({**values, "scalar": np.str_("abc"), "w": WEIGHT}, tmp_path / "a.pt")
    sp.convert(tmp_path / "a.pt", tmp_path / "b", to="shardproof")
    for path in (tmp_path / "a.pt", tmp_path / "b"):
        with sp.open(path) as checkpoint:
            assert checkpoint["scalar"] == "abc"
            for key, value in values.items():
                found = checkpoint[key]
                assert (found.dtype, found.shape) == (value.dtype, value.shape)
                assert np.array_equal(found, value)
    target: dict[str, Any] = {**dict.fromkeys(values), "scalar": "", "w": torch.zeros(3)}
    sp.load(tmp_path / "b", target)
    assert np.array_equal(target["long"], values["long"])
