"""The list of phases that events, errors and the documentation share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class KnownPhase:
    """One phase of one operation.

    Example:
        >>> [phase.name for phase in PHASES if phase.operation == "load" and phase.in_events]
        ['match', 'read', 'apply']
    """

    operation: str
    """First word of the operation, such as ``save``; ``any`` for a phase of every operation."""
    name: str
    kind: Literal["local", "meeting", "background"]
    """Work of one rank in the caller's thread; a meeting of the ranks; or work of the background thread."""
    text: str
    """The work of a rank in the phase, in one line of Markdown."""
    in_events: bool = True
    """True if events name the phase."""
    in_errors: bool = True
    """True if errors and ``waiting`` events name the phase."""
    reported_in: str = ""
    """The phase of events in which the ranks report the outcome; empty for the phase itself."""
    compares_clocks: bool = False
    """True if all ranks end the phase almost together, so that `merge_traces` compares their clocks by it."""


_event = partial(KnownPhase, in_errors=False)
_error = partial(KnownPhase, in_events=False)

_PLAN = "reports its structure; rank 0 proves the tilings and makes the plan. Only after a change"
_BASE = "receives the digests of the base of an incremental save. Only if they are not cached"
_COMMIT = "reports its digests; rank 0 checks them and publishes the manifest: the commit"
_UPLOADED = "reports its copies; rank 0 checks them and publishes the manifest on the second tier"
_JOINED = "finds which ranks see one folder, and how to reach the others. Only with `node_local`"
_PARTED = "waits until rank 0 needs no other node any more, after a save or restore. Only with `node_local`"
_PUBLISHED = "uploads its files to an object store; rank 0 then publishes the checkpoint"
_COPIES = (
    "makes copies that were lost with a node, and meets the others. Only after a restore with `replicas=1`"
)
_APPLY = "replaces plain values and calls `load_state_dict`. Only if a rank has any"
_AGAIN = "votes on the rerun, with a suspect on the same device as before"

PHASES: tuple[KnownPhase, ...] = (
    _error("any", "connect", "local", "connects to the store that the environment names"),
    _error("any", "begin", "local", "works before the first meeting of the operation"),
    _error("any", "turn", "local", "waits until another of its threads has left its meeting"),
    _event("save", "blocked", "local", "spans the call of `Checkpointer.save`"),
    _error(
        "save",
        "busy",
        "meeting",
        'agrees whether to skip the save (`when_busy="skip"`)',
        reported_in="blocked",
    ),
    KnownPhase(
        "save",
        "collect",
        "local",
        "describes its state; your `state_dict` methods run here",
        reported_in="agree",
    ),
    _event(
        "save",
        "agree",
        "meeting",
        "reports its structure digest; rank 0 decides whether the ranks reuse their cached plan",
        compares_clocks=True,
    ),
    KnownPhase("save", "plan", "meeting", _PLAN, compares_clocks=True),
    _error("save", "base", "meeting", _BASE, reported_in="plan"),
    _event(
        "save",
        "replicas",
        "background",
        "hashes its replicas while training waits. Only with `check_replicas`",
    ),
    _event("save", "stage", "local", "copies memory that other code than an optimizer's step may write"),
    _event(
        "save",
        "fence",
        "local",
        "delays the step of an optimizer, a load or `fence` until the memory is copied",
    ),
    KnownPhase("save", "write", "background", "hashes and writes its file", reported_in="commit"),
    KnownPhase("save", "commit", "meeting", _COMMIT, compares_clocks=True),
    _event("save", "retain", "background", "removes old steps. Only on rank 0"),
    _error("save", "background", "background", "fails outside of the meetings: retention, or an interrupt"),
    _error(
        "restore",
        "choose",
        "meeting",
        "reports the newest step that it sees; rank 0 chooses the newest readable one",
    ),
    _error(
        "restore",
        "compare",
        "meeting",
        "compares which keys the chosen step lacks. Only after a load of a damaged step",
    ),
    _error(
        "load",
        "metadata",
        "meeting",
        "receives manifest and index from rank 0. Only from an object store",
        reported_in="match",
    ),
    KnownPhase(
        "load",
        "match",
        "local",
        "compares its tree with the checkpoint; changes nothing",
        compares_clocks=True,
    ),
    _error(
        "load",
        "share",
        "meeting",
        "agrees which rank reads each box that several ranks need. Only with `read_once`",
        reported_in="match",
    ),
    KnownPhase("load", "read", "local", "reads, verifies and fills tensors; the target changes from here on"),
    KnownPhase("load", "apply", "local", _APPLY, compares_clocks=True),
    _event("verify", "read", "local", "reads and verifies every chunk"),
    _event("diff", "read", "local", "reads the tensors that may differ"),
    _error("convert", "plan", "meeting", "plans the conversion; rank 0 takes the work folder"),
    KnownPhase("convert", "write", "local", "writes its units; rank 0 then writes the metadata"),
    KnownPhase("convert", "verify", "local", "reads its share again"),
    KnownPhase("convert", "publish", "local", _PUBLISHED),
    _event("copy", "read", "local", "copies the files of a step (`convert --standalone`)"),
    _error("settle", "settle", "meeting", "agrees on the verdict of a suspect, which rank 0 writes"),
    _error("pin", "pin", "meeting", "agrees on the pin of a step, which rank 0 writes or removes"),
    _error("schedule", "choose", "meeting", "agrees on the call of `save_if_due` at which all ranks save"),
    _error("nodes", "join", "meeting", _JOINED),
    _error("nodes", "part", "meeting", _PARTED),
    KnownPhase("nodes", "copy", "background", _COPIES),
    _error("upload", "prepare", "meeting", "agrees on the name of the rendezvous of the uploads, once"),
    _error("upload", "plan", "meeting", "receives its part of the newest step that waits for its upload"),
    KnownPhase(
        "upload",
        "copy",
        "background",
        "verifies its files and copies them to the second tier",
        reported_in="commit",
    ),
    KnownPhase("upload", "commit", "meeting", _UPLOADED, compares_clocks=True),
    _error("save", "latest", "meeting", "waits until rank 0 has replaced the file `latest` (DeepSpeed)"),
    _error("load", "format", "meeting", "waits until rank 0 has found the format (DeepSpeed, Megatron-Core)"),
    _error("load", "open", "meeting", "opens the files that DeepSpeed wrote"),
    _error("load", "finish", "meeting", "sets the options and the counters that DeepSpeed wrote"),
    _error("load", "common", "meeting", "reads the common state (Megatron-Core)"),
    _error("load", "choose", "meeting", "chooses the newest checkpoint: that of rank 0 (adapters)"),
    _error("load", "prepare", "meeting", "materializes a model of Hugging Face, before the load"),
    _error("match", "keys", "meeting", "compares its keys with those of the other ranks (Megatron-Core)"),
    _error("compare", "digest", "meeting", "compares the digests of its boxes and replicas (Megatron-Core)"),
    _error("compare", "boxes", "meeting", "compares boxes and replicas that are not proved (Megatron-Core)"),
    _error("compare", "common", "meeting", "compares the common state (Megatron-Core)"),
    _error("export", "prepare", "meeting", "plans an export to Hugging Face; rank 0 takes the work folder"),
    _error("export", "publish", "meeting", "waits until rank 0 has moved the exported model to its place"),
    _error("validate", "initial run", "meeting", "votes on the first run of a step"),
    _error("validate", "rerunning in place", "meeting", "votes on the second run, in the same process"),
    _error("validate", "will rerun from checkpoint", "meeting", "resumes the step of a suspect checkpoint"),
    _error("validate", "rerunning from checkpoint", "meeting", "votes on the rerun on another device"),
    _error("validate", "rerunning again from checkpoint", "meeting", _AGAIN),
)
"""Every phase that this package names, in the order in which a rank goes through it."""
