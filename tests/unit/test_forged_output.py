"""No key and no path forges a line of output, and no error repeats credentials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.commands.cli.group import run as command_line
from shardproof.errors import ShardproofError
from shardproof.storage import storage_at

FORGED = "whole: /runs/a: everything is fine"
KEY = f"w\n{FORGED}\x1b[2J\u202e"
SECRET = "topsecret"


def no_line_is_forged(text: str) -> None:
    assert FORGED in text, "the key is shown"
    assert not any(line.lstrip().startswith("whole:") for line in text.splitlines())
    assert "\x1b" not in text and "\u202e" not in text


@pytest.mark.parametrize(
    "words", [["inspect", "RUN/a"], ["inspect", "RUN/a", "KEY"], ["diff", "RUN/a", "RUN/b"]]
)
def test_a_key_forges_no_line_of_a_command(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sp.save(tmp_path / "a", {KEY: torch.ones(2), f"{KEY} text": "one"})
    sp.save(tmp_path / "b", {f"{KEY} other": torch.ones(2)})
    command_line([word.replace("RUN", str(tmp_path)).replace("KEY", KEY) for word in words])
    no_line_is_forged(capsys.readouterr().out)


def test_a_key_forges_no_line_of_an_error(tmp_path: Path) -> None:
    sp.save(tmp_path / "a", {KEY: torch.ones(2)})
    with pytest.raises(ShardproofError) as mismatch:
        sp.load(tmp_path / "a", {"other": torch.ones(2)})
    no_line_is_forged(mismatch.value.message)
    assert KEY in mismatch.value.details["unexpected"], "programs get the key as it is"
    torch.save({KEY: {"b": torch.ones(2)}, f"{KEY}.b": 1}, tmp_path / "model.pt")
    with pytest.raises(ShardproofError, match="two values have the key") as foreign:
        sp.open(tmp_path / "model.pt")
    no_line_is_forged(str(foreign.value))


def test_a_path_forges_no_line(tmp_path: Path) -> None:
    folder = tmp_path / f"run\n{FORGED.replace('/', '-')}"
    with pytest.raises(ShardproofError) as caught:
        sp.open(folder)
    assert len(caught.value.message.splitlines()) < 3
    assert not any(line.startswith("whole:") for line in caught.value.message.splitlines())


LEAKS: list[tuple[str, Any]] = [
    (f"s3://AKIA:{SECRET}@bucket/run", None),
    (f"s3://bucket/run?X-Amz-Signature={SECRET}", None),
    (f"az://container/run?sv=1&sig={SECRET}", None),
    (f"https://user:{SECRET}@host/run", None),
    (f"foo://u:{SECRET}@x/run", None),
    (f"memory://u:{SECRET}@x/run", {"a": SECRET}),
    ("s3://bucket/run", SECRET),
    ("s3://bucket/run", {"secret_access_key_of_mine": SECRET}),
    ("s3://bucket/run", {"secret_access_key": SECRET, "conditional_put": SECRET}),
    ("gs://bucket/run", {"service_account_key": SECRET}),
    ("az://c/run", {"account_key": SECRET, "account_name": "x"}),
    ("az://c/run", {"sas_token": f"{SECRET}%%", "account_name": "x"}),
]


@pytest.mark.parametrize(("url", "options"), LEAKS)
def test_credentials_are_in_no_error(url: str, options: Any) -> None:
    with pytest.raises((ShardproofError, TypeError)) as caught:
        storage_at(url, options)
    assert SECRET not in str(caught.value)
    assert SECRET not in str(getattr(caught.value, "details", ""))


def test_the_error_of_a_request_hides_the_credentials_of_the_endpoint() -> None:
    options = {
        "endpoint": f"http://user:{SECRET}@127.0.0.1:1", "region": "x", "access_key_id": "a",
        "secret_access_key": SECRET, "retry_config": {"max_retries": 0},
    }  # fmt: skip
    with pytest.raises(sp.StorageError, match="cannot look at") as caught:
        storage_at("s3://bucket/run", options).size("a")
    assert SECRET not in str(caught.value) and SECRET not in str(caught.value.details)


def test_new_files_and_folders_have_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        sp.save(tmp_path / "run" / "a", {"w": torch.ones(2)})
        sp.convert(tmp_path / "run" / "a", tmp_path / "new" / "b", to="dcp")
    finally:
        os.umask(before)
    made = [path for top in ("run", "new") for path in (tmp_path / top).rglob("*")]
    assert made and all(path.stat().st_mode & 0o077 == 0 for path in made)
