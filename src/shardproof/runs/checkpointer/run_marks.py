"""Marks on steps that all ranks set together: pins, and the verdicts on suspects."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

import msgspec

from shardproof.engine.rendezvous import MeetingSequence
from shardproof.engine.saving import Saver
from shardproof.errors import StructureError
from shardproof.runs.checkpointer.marks import remove_pin, write_pin, write_settled
from shardproof.runs.checkpointer.open_run import OpenRun
from shardproof.runs.checkpointer.step_folders import StepFolder

_log = logging.getLogger("shardproof")


def change_pin(run: OpenRun, saver: Saver, step: Any, label: Any) -> None:
    """Pins a step, or removes its pin. See `Checkpointer.pin` for the errors."""
    operation = f"pin {run.location}"

    def describe() -> bytes:
        number, _ = parse_argument(step, suspect=False)
        if not isinstance(number, int) or isinstance(number, bool):
            raise StructureError(f"pin needs a whole number as step, not {step!r}")
        if label is not None and not isinstance(label, str):
            raise StructureError(f"pin needs a text as label, not {label!r}")
        return msgspec.msgpack.encode((number, label))

    def decide(posts: Sequence[bytes]) -> bytes:
        other = next((rank for rank, post in enumerate(posts) if post != posts[0]), None)
        if other is not None:
            raise StructureError(
                f"{run.location}: rank 0 and rank {other} pin different steps, or with different labels; "
                "nothing was changed. Pass the same arguments on all ranks",
                ranks=[0, other],
            )
        number, text = msgspec.msgpack.decode(posts[0], type=tuple[int, str | None])
        for tier in run.holders(number):
            if text is None:
                remove_pin(tier, number)
            else:
                run.check_restorable(tier, number)
                write_pin(tier, number, text)
        return b""

    with run.rendezvous.operation(operation):
        saver.wait_for_end()  # its retention may remove the step
        MeetingSequence(run.rendezvous, operation).meet("pin", describe, decide)


def settle_suspect(run: OpenRun, saver: Saver, step: Any, verdict: Any) -> None:
    """Stores the verdict on a suspect. See `Checkpointer.settle_suspect` for the errors."""
    operation = f"settle {run.location}"
    number, folder = parse_argument(step, suspect=True)

    def describe() -> bytes:
        if not isinstance(number, int):
            raise StructureError(f"settle_suspect needs a whole number as step, not {step!r}")
        if not isinstance(verdict, str):
            raise StructureError(f"settle_suspect needs a text as verdict, not {verdict!r}")
        return msgspec.msgpack.encode((folder, verdict))

    def decide(posts: Sequence[bytes]) -> bytes:
        verdicts = [msgspec.msgpack.decode(post, type=tuple[str, str]) for post in posts]
        other = next((rank for rank, one in enumerate(verdicts) if one != verdicts[0]), None)
        if other is not None:
            raise StructureError(
                f"{run.location}: rank 0 settles {': '.join(verdicts[0])}, but rank {other} settles "
                f"{': '.join(verdicts[other])}; nothing was settled. Pass the same verdict on all ranks",
                ranks=[0, other],
            )
        if not write_settled(run.storage.within(folder), verdict):
            _log.warning("%s/%s: nothing to settle: there is no committed suspect", run.location, folder)
        return b""

    with run.rendezvous.operation(operation):
        saver.wait_for_end()
        MeetingSequence(run.rendezvous, operation).meet("settle", describe, decide)


def parse_argument(step: Any, *, suspect: bool) -> tuple[Any, str]:
    """A step that a caller passes, and its folder. An invalid one becomes a text.

    A save reports the text to rank 0, so that every rank raises the error.
    """
    try:
        number = operator.index(step)
        return (step if isinstance(step, bool) else number), StepFolder(number, suspect).name
    except (TypeError, ValueError):
        return repr(step), "invalid-step"


def checked_step(step: Any) -> int:
    """A step that a caller passes, as an int.

    Raises:
        StructureError: it is no valid step.

    >>> checked_step(1000)
    1000
    """
    number, _ = parse_argument(step, suspect=False)
    if isinstance(number, bool) or not isinstance(number, int):
        raise StructureError(f"step is {step!r}, not an int from 0 to 10**18 - 1")
    return number
