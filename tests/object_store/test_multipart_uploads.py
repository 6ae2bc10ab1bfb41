"""Multipart uploads of dead saves: `prune` removes them, `doctor` names them. Other uploads stay."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from email.message import Message
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit
from urllib.request import OpenerDirector, Request
from urllib.response import addinfourl
from xml.etree import ElementTree

import pytest
import torch
from obstore.store import S3Store

import shardproof as sp
from shardproof.commands.cli.group import run
from shardproof.engine.storage import ObjectStorage, Upload, time_at
from shardproof.engine.storage.multipart_uploads import MultipartUploads
from shardproof.runs.checkpointer import plan_prune, prune
from tests.object_store.faulty_proxy import FaultyProxy
from tests.object_store.seaweed import PART, S3Server

pytestmark = pytest.mark.processes

HOUR = 3600.0


def shard(step: int, rank: int, attempt: str) -> str:
    return f"step-{step:08d}/shards/{rank:05d}-{attempt}.safetensors"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = run([*arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out or err)


def test_prune_removes_the_uploads_of_dead_saves_and_nothing_else(
    url: str, begin_upload: Callable[[ObjectStorage, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = sp.Checkpointer(url)
    checkpointer.save(1, {"w": torch.arange(1000.0)}).result()
    storage, beside = ObjectStorage(url), ObjectStorage(f"{url}-2")
    files = storage.list()
    dead = begin_upload(storage, shard(2, 0, "dead"))
    foreign = (
        begin_upload(storage, "step-00000002/tokenizer.bin"),
        begin_upload(storage, shard(10**9, 0, "x")[5:]),
    )
    begin_upload(beside, shard(2, 0, "dead"))
    now = time.time()

    later = plan_prune(storage, storage.modified, older_than=HOUR, now=now)
    assert later.empty and [one.id for one in later.recent_uploads] == [dead]
    code, report = answer(capsys, "doctor", url)
    assert (code, [(one["severity"], one["kind"]) for one in report["findings"]]) == (
        0,
        [("note", "in progress")],
    )
    assert run(["prune", url]) == 0
    assert "save may be in progress" in capsys.readouterr().out

    code, report = answer(capsys, "doctor", url, "--older-than", "0s")
    ((kind, where, what),) = [(one["kind"], one["where"], one["what"]) for one in report["findings"]]
    assert (code, kind, where) == (1, "uploads", "step-00000002") and what.startswith("16.8 MB in 1 upl")
    assert run(["prune", url, "--older-than", "0s", "--dry-run"]) == 0
    assert "shards/00000-dead.safetensors, whose upload did not complete" in " ".join(
        capsys.readouterr().out.split()
    )

    plan = plan_prune(storage, storage.modified, older_than=HOUR, now=now + 2 * HOUR)
    assert [(one.id, one.bytes) for one in plan.uploads] == [(dead, PART)] and plan.bytes == PART
    assert not plan.leftovers and not plan.recent_uploads
    assert prune(storage, plan) == []
    assert sorted(one.id for one in storage.uploads(0.0)) == sorted(foreign)
    assert len(beside.uploads(0.0)) == 1 and storage.list() == files
    assert prune(storage, plan) == [], "an upload that ended is no error"
    target = {"w": torch.zeros(1000)}
    assert checkpointer.restore(target) == 1 and torch.equal(target["w"], torch.arange(1000.0))


def test_files_and_uploads_of_one_attempt_have_one_age(
    url: str, begin_upload: Callable[[ObjectStorage, str], str]
) -> None:
    """One rank may upload for hours after another rank finished."""
    storage = ObjectStorage(url)
    begin_upload(storage, shard(3, 0, "slow"))
    sink = storage.create(shard(3, 1, "slow"))
    sink.finish(0)
    sink = storage.create(shard(3, 1, "other"))
    sink.finish(0)

    def modified(name: str) -> float | None:
        return (storage.modified(name) or 0.0) - 5 * HOUR

    plan = plan_prune(storage, modified, older_than=HOUR, now=time.time())
    assert [one.attempt for one in plan.leftovers] == ["other"]
    assert [one.attempt for one in plan.writing] == ["slow"] and len(plan.recent_uploads) == 1


def test_an_upload_is_as_old_as_its_last_part(
    url: str, begin_upload: Callable[[ObjectStorage, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(url)
    begin_upload(storage, shard(3, 0, "slow"))
    parsed = ElementTree.fromstring

    def long_ago(body: bytes) -> ElementTree.Element:
        page = parsed(body)
        for begun in page.iterfind("{*}Upload/{*}Initiated"):
            begun.text = "2020-01-01T00:00:00Z"
        return page

    monkeypatch.setattr(ElementTree, "fromstring", long_ago)
    plan = plan_prune(storage, storage.modified, older_than=HOUR, now=time.time())
    assert not plan.uploads and len(plan.recent_uploads) == 1


@pytest.mark.parametrize("signs", [True, False])
def test_the_clock_of_the_store_decides_the_age_of_a_save(
    url: str,
    begin_upload: Callable[[ObjectStorage, str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signs: bool,
) -> None:
    """The clock of this machine is three hours ahead. Without signed requests, a test object has the time."""
    storage = ObjectStorage(url)
    upload = begin_upload(storage, shard(3, 0, "running"))
    storage.create(shard(3, 1, "running")).finish(0)
    real, files = time.time, storage.list()
    monkeypatch.setattr(time, "time", lambda: real() + 3 * HOUR)
    if not signs:
        monkeypatch.setattr(MultipartUploads, "time_of_store", lambda self, key: None)
    assert abs(time_at(storage) - real()) < 60
    assert answer(capsys, "prune", url, "--yes")[1]["removed"] is False
    _, report = answer(capsys, "doctor", url, *([] if signs else ["--probe"]))
    kinds = {"in progress", "no steps"} if signs else {"in progress", "no steps", "clock"}
    assert {one["kind"] for one in report["findings"]} == kinds
    if signs:
        _, report = answer(capsys, "watch", url, "--once")
        assert [one["state"] for one in report["saves"]] == ["writing"]
    assert [one.id for one in storage.uploads(0.0)] == [upload] and storage.list() == files


def test_a_policy_that_forbids_the_removal_of_uploads_is_named(
    s3: S3Server,
    url: str,
    begin_upload: Callable[[ObjectStorage, str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage = ObjectStorage(url)
    sink = storage.create(shard(2, 0, "old"))
    sink.finish(0)
    begin_upload(storage, shard(2, 0, "dead"))
    later = time.time() + 2 * HOUR
    reader = ObjectStorage(url, s3.reader_options)
    plan = plan_prune(reader, reader.modified, older_than=HOUR, now=later)
    assert len(plan.uploads) == 1

    class MayDelete(ObjectStorage):
        """Deletes files with other credentials."""

        def delete(self, name: str) -> None:
            storage.delete(name)

    with pytest.raises(sp.StorageError, match=r"all else is removed, but 1 of 1 .* s3:AbortMultipartUpload"):
        prune(MayDelete(url, s3.reader_options), plan)
    assert storage.list() == [] and len(storage.uploads(0.0)) == 1

    sink = storage.create(shard(2, 0, "old"))
    sink.finish(0)
    refused = ObjectStorage(url, {**s3.options, "secret_access_key": "wrong"})

    class MayNotListUploads(ObjectStorage):
        """Lists uploads with wrong credentials."""

        def uploads(self, parts_before: float) -> Any:
            return refused.uploads(parts_before)

    unlistable = MayNotListUploads(url)
    plan = plan_prune(unlistable, unlistable.modified, older_than=HOUR, now=later)
    assert plan.uploads == () and len(plan.leftovers) == 1
    assert "403" in plan.uploads_fault and "s3:ListBucketMultipartUploads" in plan.uploads_fault
    prune(unlistable, plan)
    assert storage.list() == []


def test_all_pages_are_read(
    s3: S3Server, url: str, begin_upload: Callable[[ObjectStorage, str], str]
) -> None:
    storage = ObjectStorage(url)
    begun = {begin_upload(storage, shard(1, rank, "a")) for rank in range(3)}
    store = S3Store.from_url("s3://tests", config=s3.options, client_options={"allow_http": True})
    whole, paged = (MultipartUploads(store, "s3://tests", 10.0, page=page) for page in (1000, 1))
    below = f"{url.rpartition('/')[2]}/"
    assert {one.id for one in paged.list(below, 0.0)} == begun
    assert paged.list(below, time.time() + HOUR) == whole.list(below, time.time() + HOUR)


@pytest.mark.parametrize("page", [1000, 1], ids=["before the parts", "between two pages of parts"])
def test_an_upload_that_ends_during_the_listing_is_left_out(
    s3: S3Server, url: str, begin_upload: Callable[..., str], page: int
) -> None:
    """It is no upload of 0 bytes, nor one with a part of its bytes. The server answers NoSuchUpload."""
    storage = ObjectStorage(url)
    ends = shard(1, 0, "ends")
    number = begin_upload(storage, ends, parts=2)
    stays = begin_upload(storage, shard(1, 1, "stays"))
    proxy = FaultyProxy(s3.endpoint)
    try:
        store = S3Store.from_url(
            "s3://tests",
            config={**s3.options, "endpoint": proxy.endpoint},
            client_options={"allow_http": True},
        )
        uploads = MultipartUploads(store, "s3://tests", 10.0, page=page)
        proxy.stall_at = "part-number-marker=1" if page == 1 else "ends.safetensors?max-parts"
        found: list[list[Upload]] = []
        listing = threading.Thread(
            target=lambda: found.append(uploads.list(f"{url.rpartition('/')[2]}/", time.time() + HOUR))
        )
        listing.start()
        assert proxy.stalled.wait(60)
        storage.abort_upload(Upload(ends, number, None, 0.0))
        proxy.stall_at = None
        proxy.stalled.clear()
        listing.join(60)
    finally:
        proxy.close()
    ((only,),) = found
    assert (only.id, only.bytes) == (stays, PART)


def test_requests_to_a_failing_store_are_retried_until_the_deadline(s3: S3Server, url: str) -> None:
    proxy = FaultyProxy(s3.endpoint)
    try:
        storage = ObjectStorage(url, {**s3.options, "endpoint": proxy.endpoint})
        proxy.refuse = 3
        assert storage.uploads(0.0) == [] and proxy.refuse == 0
        proxy.refuse = 1000
        begun = time.monotonic()
        short = {"retry_config": {"retry_timeout": timedelta(seconds=1)}}
        hasty = ObjectStorage(url, {**s3.options, "endpoint": proxy.endpoint, **short})
        with pytest.raises(sp.StorageError, match="503.*at most 1 s"):
            hasty.uploads(0.0)
        assert time.monotonic() - begun < 10
    finally:
        proxy.close()


def signature(secret: str, method: str, url: str) -> str:
    """The signature of a URL, from the description of Signature Version 4 with query parameters."""
    parts = urlsplit(url)
    fields = dict(parse_qsl(parts.query, keep_blank_values=True))
    fields.pop("X-Amz-Signature", None)
    names = [(quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in fields.items()]
    canonical = "\n".join(
        [
            method,
            parts.path,
            "&".join(f"{name}={value}" for name, value in sorted(names)),
            f"host:{parts.netloc}\n",
            "host",
            "UNSIGNED-PAYLOAD",
        ]
    )
    _, day, region, service, end = fields["X-Amz-Credential"].split("/")
    text = "\n".join(
        [
            "AWS4-HMAC-SHA256",
            fields["X-Amz-Date"],
            f"{day}/{region}/{service}/{end}",
            hashlib.sha256(canonical.encode()).hexdigest(),
        ]
    )
    key = f"AWS4{secret}".encode()
    for word in (day, region, service, end, text):
        key = hmac.digest(key, word.encode(), "sha256")
    return key.hex()


SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


def test_the_signature_is_that_of_the_description() -> None:
    """The example of Amazon's description of query parameters."""
    example = (
        "https://examplebucket.s3.amazonaws.com/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256"
        "&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    )
    expected = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    assert signature(SECRET, "GET", example) == expected


@pytest.mark.parametrize(
    ("options", "root"),
    [
        ({}, "https://s3.eu-west-1.amazonaws.com/bucket"),
        ({"virtual_hosted_style_request": True}, "https://bucket.s3.eu-west-1.amazonaws.com/"),
        ({"endpoint": "https://store:9000/"}, "https://store:9000/bucket"),
    ],
)
@pytest.mark.parametrize("token", [None, "a+b/c=="])
def test_requests_are_signed_as_amazon_describes(
    options: dict[str, Any], root: str, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    keys = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": SECRET, "region": "eu-west-1"}
    if token is not None:
        keys["session_token"] = token
    sent: list[tuple[str, str]] = []

    def send(opener: OpenerDirector, request: Request, **how: Any) -> Any:
        sent.append((request.get_method(), request.full_url))
        return addinfourl(io.BytesIO(b"<R/>"), Message(), request.full_url)

    monkeypatch.setattr(OpenerDirector, "open", send)
    storage = ObjectStorage("s3://bucket/run é+~/a b", {**keys, **options})
    storage.uploads(0.0)
    storage.abort_upload(Upload("step/x", "id+/=~", None, 0.0))
    (listing, listed), (removal, aborted) = sent
    assert (listing, removal) == ("GET", "DELETE")
    query = parse_qsl(urlsplit(listed).query, keep_blank_values=True)
    assert query[:3] == [("max-uploads", "1000"), ("prefix", "run é+~/a b/"), ("uploads", "")]
    assert listed.startswith(f"{root}?")
    assert aborted.startswith(f"{root.rstrip('/')}/run%20%C3%A9%2B~/a%20b/step/x?uploadId=id%2B%2F%3D~&X-")
    for method, url in sent:
        fields = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
        assert fields["X-Amz-Signature"] == signature(SECRET, method, url)
        assert fields.get("X-Amz-Security-Token") == token


def test_a_signed_url_of_another_request_is_not_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    sign = obstore.sign
    monkeypatch.setattr(obstore, "sign", lambda *args: sign(*args).replace("uploads=", "upload="))
    with pytest.raises(sp.StorageError, match="this version of obstore signs another request"):
        ObjectStorage(url).uploads(0.0)


def test_stores_that_cannot_list_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"account_name": "a", "account_key": "a2V5"}
    assert ObjectStorage("az://container/run", key).uploads(0.0) == []
    with pytest.raises(sp.StorageError, match="lists them for HMAC keys only"):
        ObjectStorage("gs://bucket/run", {"skip_signature": True}).uploads(0.0)
