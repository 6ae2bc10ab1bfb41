"""Finds paths with a ``~`` that nobody expanded."""

from __future__ import annotations

import os


def unexpanded_home(path: str) -> str | None:
    """What is wrong with a path that has a ``~``, and the advice; None for other paths.

    Only a shell expands ``~``. The operating system takes it for the name of a folder, so a program would
    write into a folder of that name in its working directory.

    >>> print(unexpanded_home("~/runs"))
    ~ is not expanded: pass os.path.expanduser('~/runs')
    >>> unexpanded_home("/runs/gpt~/a") is None
    True
    """
    if os.path.expanduser(path) != path:
        return f"~ is not expanded: pass os.path.expanduser({path!r})"
    if "~" in path.split(os.sep):
        return (
            "it has a folder named ~. Apply os.path.expanduser where the path is made, or rename the folder"
        )
    return None
