"""The interface of an adapter: one way of saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from peers.subject import Subject


@dataclass(frozen=True, slots=True)
class Save:
    """A save that has begun."""

    wait: Callable[[], object]
    """Blocks until the peer reports that the save is done. All ranks call it together."""
    done: Callable[[], bool]
    """True if it is done on this rank. All ranks call it together, because one peer communicates in it."""


FINISHED = Save(lambda: None, lambda: True)
"""The result of a way whose `begin` returns when the save is done."""


class Way:
    """Saves and loads a `Subject`. All methods are called by all ranks together.

    A subclass that saves in the background returns from `begin` as soon as the peer lets training go on.
    """

    name = ""
    package = ""
    """Distribution whose version is reported."""
    flushes = ""
    """How it brings its bytes to stable storage before it reports a save as done."""
    driven = ""
    """How its use here differs from its documentation; empty if it does not differ."""
    asynchronous = False
    needs_optimizer = False
    """Whether it saves a module and its optimizer, not bare tensors."""
    in_place = True
    """Whether a load fills the existing tensors; otherwise it makes new ones."""
    holds_copy = False
    """Whether `prepare` copies the whole state, because the peer cannot hold torch's tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def release(cls) -> str:
        """Version of the package."""
        try:
            return version(cls.package)
        except PackageNotFoundError:
            return "not installed"

    def path(self, number: int) -> Path:
        """Folder of one save."""
        return self.folder / f"step-{number:08d}"

    def prepare(self, subject: Subject) -> None:
        """Wraps the tensors in what the peer saves, once and unmeasured."""

    def begin(self, number: int) -> Save:
        """Saves the prepared subject."""
        raise NotImplementedError

    def may_change(self) -> None:
        """Blocks until tensors may be changed, for ways whose `begin` returns before that."""

    def load(self, number: int) -> None:
        """Loads into the prepared subject."""
        raise NotImplementedError

    def loaded(self, subject: Subject) -> list[torch.Tensor]:
        """This rank's parts as the last load left them, in the subject's order."""
        return subject.tensors

    def close(self) -> None:
        """Ends processes and threads."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def files_under(folder: Path) -> Iterator[Path]:
    """All files of a save, in one order on all ranks."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
