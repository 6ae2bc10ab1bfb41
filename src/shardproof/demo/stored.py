"""The last checkpoint once more, by one process without a process group: verified, read, compared."""

from __future__ import annotations

from pathlib import Path

from shardproof.demo.evidence import RunRecords, TensorComparison
from shardproof.demo.report import StoredFacts

__all__ = ["stored_facts"]


def stored_facts(checkpoints: Path, step: int, saved: RunRecords) -> StoredFacts:
    """Verify the checkpoint of a step, and compare what `shardproof.open` reads with what its run saved."""
    from shardproof.maintenance import verify
    from shardproof.storage import LocalStorage

    folder = checkpoints / f"step-{step:08d}"
    found = verify(LocalStorage(folder))
    return StoredFacts(
        step=step,
        location=str(folder),
        verified=found.ok,
        faults=tuple(str(fault) for fault in found.faults),
        chunks=found.chunks,
        bytes=found.bytes,
        seconds=found.seconds,
        read=_read(folder, step, saved),
    )


def _read(folder: Path, step: int, saved: RunRecords) -> TensorComparison:
    import shardproof as sp
    from shardproof.demo.digests import digest_of

    record = saved.digests("saved", step)
    expected = record["tensors"] if record else {}
    differing = []
    with sp.open(folder) as checkpoint:
        keys: list[str] = checkpoint.keys()
        stored = {key for key in keys if key.startswith(("model.", "optimizer."))}
        for name, (digest, _) in expected.items():
            parameter, _, slot = name.partition(" · ")
            key = f"optimizer.{parameter}.{slot}" if slot else f"model.{parameter}"
            if key not in stored or digest_of(checkpoint[key].read())[0] != digest:
                differing.append(name)
            stored.discard(key)
        # Options of parameter groups are plain values; any other key is of a tensor that nobody saved.
        differing += sorted(key for key in stored if not key.endswith(".@options"))
    size = sum(int(size) for _, size in expected.values())
    return TensorComparison(len(expected), len(expected) - len(differing), size, tuple(differing))
