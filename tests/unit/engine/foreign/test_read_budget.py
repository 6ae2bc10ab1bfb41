"""Small pickles that ask for much memory or time are refused, and honest ones are far from the bound."""

from __future__ import annotations

import pickle  # noqa: TID251 the pickles to read as data
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import shardproof as sp
from shardproof.errors import FormatError
from shardproof.formats.pickle_data import read_pickle
from shardproof.formats.torch.torch_tensors import plain_builders

REPEATS = 20_000
"""With the 500 kB that is repeated, or the 50,000 keys, far more than a machine has of memory or patience."""
LONG = 500_000


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def blob(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def integer(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def many(one: bytes, before: bytes = b"", count: int = REPEATS) -> bytes:
    """A list of `count` items. `before` puts values into the memo."""
    return b"\x80\x02" + before + b"](" + one * count + b"e."


def doubled(first: bytes, levels: int, open_: bytes, close: bytes) -> bytes:
    """A value that holds the one before it twice, and so on."""
    parts = [b"\x80\x02", first, b"q\x00"]
    for _ in range(levels):
        parts += [b"0", open_, b"h\x00h\x00", close, b"q\x00"]
    return b"".join(parts) + b"."


def named(name: str) -> bytes:
    module, _, kind = name.rpartition(".")
    return f"c{module}\n{kind}\n".encode()


ARGUMENT = blob(bytes(LONG)) + b"\x85q\x000"
NUMBERS = b"(" + b"K\x01" * LONG + b"t\x85q\x000"
COLLIDING = [integer(at * (2**61 - 1)) for at in range(1, 50_000)]

COPIES = {
    "bytearray": many(named("builtins.bytearray") + b"h\x00R", ARGUMENT),
    "BytesIO": many(named("io.BytesIO") + b"h\x00R", ARGUMENT),
    "deque": many(named("collections.deque") + b"h\x00R", NUMBERS),
    "deque of a text": many(named("collections.deque") + b"h\x00R", text("\u4e00" * LONG) + b"\x85q\x000"),
    "torch.Size": many(named("torch.Size") + b"h\x00R", NUMBERS),
    "new object": many(named("builtins.bytearray") + b"h\x00\x81", ARGUMENT),
    "set": many(named("builtins.set") + b"h\x00R", NUMBERS),
    "OrderedDict": many(
        named("collections.OrderedDict") + b"h\x00R", b"]((K\x01K\x02t" + b"2" * LONG + b"e\x85q\x000"
    ),
    "name of a class": many(b"h\x00h\x00\x93", text("a" * LONG) + b"q\x000"),
    "state of an array": many(
        named("numpy.core.multiarray._reconstruct") + b")" * 3 + b"\x87Rh\x00b",
        b"(K\x01(J" + struct.pack("<i", LONG) + b"t" + named("numpy.dtype") + text("u1") + b"\x85R\x89"
        + blob(bytes(LONG)) + b"tq\x000",
    ),
}  # fmt: skip
KEYS = {
    "equal hashes": b"}(" + b"".join(one + b"N" for one in COLLIDING) + b"u.",
    "equal hashes, one by one": b"}" + b"".join(one + b"Ns" for one in COLLIDING) + b".",
    "equal hashes in a set": b"\x8f(" + b"".join(COLLIDING) + b"\x90.",
    "equal hashes of tuples": b"}(" + b"".join(one + b"\x85N" for one in COLLIDING) + b"u.",
    "equal hashes of a Counter": (
        named("collections.Counter") + b"](" + b"".join(one + b"N\x86" for one in COLLIDING) + b"e\x85R."
    ),
    "long tuple": b"(" + b"K\x01" * LONG + b"tq\x000}" + b"h\x00Ns" * REPEATS + b".",
    "large integer": integer(1 << 8 * LONG) + b"q\x000}" + b"h\x00Ns" * REPEATS + b".",
}


@pytest.mark.parametrize("name", [*COPIES, *KEYS])
def test_a_small_pickle_that_asks_for_much_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"a\.pkl.*(repeats itself too often|same hash|are a str)"):
        read_pickle({**COPIES, **KEYS}[name], plain_builders(), file="a.pkl")


def torch_file(folder: Path, pickled: bytes) -> Path:
    """A file of torch.save that has this pickle."""
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    return path


def read_all(path: Path) -> None:
    with sp.open(path) as checkpoint:
        for key in checkpoint:
            checkpoint[key]


CHILDREN = b"}(" + b"".join(text(str(at)) + b"N" for at in range(20_000)) + b"u"
VALUES = {
    "one long key above many": b"\x80\x02}(" + text("a" * LONG) + CHILDREN + b"u.",
    "a tuple of long texts as key": (
        b"\x80\x02" + text("a" * LONG) + b"q\x000}((" + b"h\x00" * 200 + b"t" + CHILDREN + b"u."
    ),
    "a dict that holds the former twice": doubled(b"}", 120, b"}(" + b"", b"u").replace(
        b"}(h\x00h\x00u", b"}(K\x01h\x00K\x02h\x00u"
    ),
    "a list that holds the former twice": doubled(b"]", 120, b"](", b"e"),
    "a list in a dict": b"\x80\x02}(" + text("a") + doubled(b"]", 120, b"](", b"e")[2:-1] + b"u.",
    "a tuple that holds the former twice": doubled(b")", 120, b"", b"\x86"),
    "one long text often": many(b"h\x00", blob(bytes(LONG)) + b"q\x000"),
    "a dict with equal texts often": (
        b"\x80\x02}(K\x01N" + b"".join(text(str(at)) + b"N" for at in range(20_000)) + b"uq\x000}("
        + b"".join(text(str(at)) + b"h\x00" for at in range(20_000)) + b"u."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_small_file_that_asks_for_much_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"model\.pt.* too often|nested deeper"):
        read_all(torch_file(tmp_path, VALUES[name]))


HUGE = integer(1 << 40_000)
REBUILD = named("torch._utils._rebuild_tensor_v2")
STORAGE = b"(" + text("storage") + named("torch.FloatStorage") + text("0") + text("cpu")
BARE = {
    "shape of huge integers": REBUILD + b"(" + STORAGE + b"K\x04tQK\x00" + HUGE + b"\x85K\x01\x85t" + b"R.",
    "storage of a huge size": REBUILD + b"(" + STORAGE + HUGE + b"tQK\x00K\x04\x85K\x01\x85tR.",
    "many dimensions": (
        named("numpy._core.multiarray._reconstruct") + b")))\x87R(K\x01(" + b"J\xff\xff\xff\x7f" * 100_000
        + b"t" + named("numpy.dtype") + text("u1") + b"\x85R\x89" + blob(b"") + b"tb."
    ),
    "key of a huge integer": b"}(" + HUGE + b"N" + text("b") + b"Nu.",
    "offset of a huge integer": REBUILD + b"(" + STORAGE + b"K\x04tQ" + HUGE + b"K\x04\x85K\x01\x85tR.",
    "a value of tuples as dtype": (
        named("torch._utils._rebuild_tensor_v3") + b"(" + STORAGE + b"K\x04tQK\x00)" + b")NN"
        + doubled(b")", 60, b"", b"\x86")[2:-1] + b"tR."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BARE)
def test_numbers_and_values_of_any_size_give_an_error_with_the_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"model\.pt"):
        read_all(torch_file(tmp_path, b"\x80\x02" + BARE[name]))


def test_errors_of_python_name_the_file_and_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": {"b": [1, 2]}}, tmp_path / "model.pt")

    def without_memory(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr("shardproof.engine.loading.opening.encode_plain", without_memory)
    with (
        sp.open(tmp_path / "model.pt") as checkpoint,
        pytest.raises(FormatError, match="MemoryError") as caught,
    ):
        checkpoint["a.b"]
    assert caught.value.details == {"file": str(tmp_path / "model.pt"), "key": "a.b"}


def test_views_of_one_storage_do_not_multiply_it(tmp_path: Path) -> None:
    whole = torch.zeros(1_000_000)
    torch.save({"views": ([whole[at:] for at in range(300)],)}, tmp_path / "model.pt")
    with pytest.raises(FormatError, match="repeats the elements"):
        read_all(tmp_path / "model.pt")


def test_honest_values_are_far_from_the_bound(tmp_path: Path) -> None:
    shared = {"lr": 0.1, "betas": (0.9, 0.95)}
    state = {
        "state": {at: {"step": at, "shape": torch.Size([at, 2]), "w": torch.zeros(1)} for at in range(3000)},
        "groups": [shared] * 3000,
        "places": {(at, "a"): at for at in range(3000)},
        "same": [{(1, 2): at} for at in range(3000)],
        "negative": {(-1, -2): 0, (-2, -1): 1},
    }
    torch.save(state, tmp_path / "model.pt")
    with sp.open(tmp_path / "model.pt") as checkpoint:
        assert checkpoint["state.2999.step"] == 2999
        assert checkpoint["places.(7, 'a')"] == 7
        assert checkpoint["same.2999.(1, 2)"] == 2999
    seen = dict.fromkeys(range(60_000), True)
    loader = {"_snapshot": {"_main_snapshot": {"_sampler_iter_state": {"already_seen_sample_indices": seen}}}}
    state = {"train_dataloader": {"dataset_state_dict": {"sampler_state_dict": loader}}}
    torch.save(state, tmp_path / "loader.pt")
    with sp.open(tmp_path / "loader.pt") as checkpoint:
        assert len(checkpoint) == 60_000
    data = pickle.dumps([{(1, 2): at} for at in range(100_000)])
    assert len(read_pickle(data, plain_builders(), file="a").value) == 100_000
