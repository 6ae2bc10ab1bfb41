"""The errors of failed meetings. Each text suffices for a person who reads the log of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardproof.engine.rendezvous.heartbeat import NO_PROGRESS
from shardproof.errors import NotCommittedError, RankFailure, RankSilent, ShardproofError, StructureError

_CALLS = ("save", "load", "restore")
"""Operations that a program calls on all ranks."""
_LISTED = 16
"""Ranks that a message lists with their own text."""
_LONGEST_CAUSE = 4000
"""Characters of a cause."""


def cause_text(error: BaseException) -> str:
    """The class and text of an exception, and the notes that shardproof or the program added to it.

    >>> error = ValueError("not positive")
    >>> error.add_note("raised by the Loader at state['loader']")
    >>> cause_text(error)
    "ValueError: not positive (raised by the Loader at state['loader'])"
    """
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    whole = f"{type(error).__name__}: {text}" if text else type(error).__name__
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    whole += f" ({'; '.join(notes)})" if notes else ""
    return whole if len(whole) <= _LONGEST_CAUSE else whole[:_LONGEST_CAUSE] + " ..."


def format_rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks as ranges of numbers.

    >>> format_rank_ranges([3, 0, 1, 2, 7])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def failure(
    operation: str, phase: str, world_size: int, causes: Mapping[int, str], silent: Iterable[int] = ()
) -> RankFailure:
    """The error of a meeting in which ranks failed. Other ranks may have fallen silent meanwhile."""
    silent = sorted(silent)
    lines = [
        f"{operation}, phase {phase}: {_ranks(causes)} of {world_size} failed, so the operation failed on "
        "every rank."
    ]
    lines += _listed({rank: causes[rank] for rank in sorted(causes)})
    if silent:
        lines.append(f"  {_ranks(silent)}: no sign of life for the deadline")
    lines.append(
        "The log of the rank named first has the full error. The ranks are still in step, so they can retry "
        "the operation."
    )
    return RankFailure(
        "\n".join(lines),
        operation=operation,
        phase=phase,
        causes={str(rank): causes[rank] for rank in sorted(causes)},
        silent=silent,
    )


def silence(
    operation: str,
    phase: str,
    world_size: int,
    deadline: float,
    last_heard: Mapping[int, float | None],
    progress: Mapping[int, str],
) -> RankSilent:
    """The error of a meeting in which ranks showed no sign of life for the deadline."""
    states = {}
    for rank, seconds in sorted(last_heard.items()):
        states[rank] = "never heard" if seconds is None else f"last heard {seconds:.1f} s ago"
        states[rank] += f", {progress[rank]}"
    lines = [
        f"{operation}, phase {phase}: {_ranks(last_heard)} of {world_size} silent for {deadline:g} s (the "
        "deadline), so the operation failed on every rank."
    ]
    lines += _listed(states)
    verb = operation.partition(" ")[0]
    if verb in _CALLS and all(text == NO_PROGRESS for text in progress.values()):
        lines.append(
            f"These ranks may not have called {verb}: all ranks call it, and `if rank == 0: {verb}(...)` "
            "waits for the others. Remove the condition. For state of one rank only, pass rendezvous="
            "shardproof.rendezvous.LocalRendezvous()."
        )
    lines.append(
        "Check the process of each rank listed above. It may have ended or run out of memory, be stopped, or "
        "hang in a file system or a collective. A longer deadline helps only if the rank works without "
        "reporting progress."
    )
    return RankSilent(
        "\n".join(lines),
        operation=operation,
        phase=phase,
        ranks=sorted(last_heard),
        last_heard={str(rank): last_heard[rank] for rank in sorted(last_heard)},
        progress={str(rank): progress[rank] for rank in sorted(progress)},
    )


def store_lost(operation: str, phase: str, text: str, last_heard: float | None) -> RankSilent:
    """The error of a rank that lost the store, and so reaches no other rank."""
    message = (
        f"{operation}, phase {phase}: cannot reach the store through which the ranks meet ({text}). Rank 0, "
        "or the launcher on its host, serves the store: check that process first. The store of a process "
        "group ends with the group: after another init_process_group, make a new Checkpointer. This rank "
        "reaches no other rank, so the operation failed on this rank."
    )
    return RankSilent(
        message,
        operation=operation,
        phase=phase,
        ranks=[0],
        last_heard={"0": last_heard},
        progress={"0": "store lost"},
        store=text,
    )


def wrong_bytes(operation: str, phase: str, text: str) -> RankFailure:
    """The error of a meeting in which the store has a value that no rank wrote."""
    return RankFailure(
        f"{operation}, phase {phase}: wrong bytes in the store through which the ranks meet.\n  {text}\n"
        "Another program may write to these keys, or the ranks may run different versions of shardproof. "
        "Give shardproof a store of its own, for example a PrefixStore, and one version on all ranks.",
        operation=operation,
        phase=phase,
        causes={"0": text},
    )


def disagreement(meetings: Mapping[int, tuple[str, str]]) -> StructureError:
    """The error of a meeting to which ranks posted for different operations."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, meeting in sorted(meetings.items()):
        groups.setdefault(meeting, []).append(rank)
    lines = ["Ranks meet for different operations, so none of them was carried out:"]
    for (operation, phase), ranks in groups.items():
        lines.append(f"  {_ranks(ranks)}: {operation}, phase {phase}")
    lines.append("Every rank must save and load in the same order, with the same arguments.")
    return StructureError(
        "\n".join(lines), meetings={str(rank): list(meeting) for rank, meeting in sorted(meetings.items())}
    )


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {format_rank_ranges(ranks)}"


def _listed(texts: Mapping[int, str]) -> list[str]:
    lines = [f"  rank {rank}: {text}" for rank, text in list(texts.items())[:_LISTED]]
    if len(texts) > _LISTED:
        lines.append(f"  and {len(texts) - _LISTED} more")
    return lines


def stuck(rank: int, seconds: float) -> RankSilent:
    """The error of a thread that waits for another thread of its rank, which hangs in a meeting."""
    return RankSilent(
        f"rank {rank} cannot start a meeting: another thread of this rank is in a meeting that has made no "
        f"progress for {seconds:.0f} s. Check the storage of the save under way: the decision of that "
        "meeting may hang there",
        phase="turn",
        ranks=[rank],
        last_heard={str(rank): seconds},
        progress={},
    )


def from_rank(rank: int, world_size: int, wire: dict[str, Any]) -> ShardproofError:
    """The error that a rank posted as data. If there are several ranks, its text names the rank.

    Rank 0 checks every file of a checkpoint at the beginning of a load. So a file that only
    another rank lacks does exist, and the node of that rank does not see it. This is not damage.
    """
    error = ShardproofError.from_wire(wire)
    if world_size == 1:
        return error
    text, details = f"rank {rank}: {error.message}", {**error.details, "rank": rank}
    if rank and (isinstance(error, NotCommittedError) or error.details.get("missing") is True):
        text += (
            "\nRank 0 sees it. Check that all nodes share this folder, and that the node of this rank mounts "
            "it."
        )
        details["damaged"] = False
    return type(error)(text, **details)
