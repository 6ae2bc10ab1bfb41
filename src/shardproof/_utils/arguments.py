"""Checks of arguments, with errors or warnings that name the argument and what it takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Real
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def wrong_type(name: str, value: object, takes: str) -> TypeError:
    """The error of an argument of a wrong type.

    >>> str(wrong_type("overwrite", "no", "True or False"))
    "overwrite is True or False, not 'no' (a str)"
    """
    kind = "" if value is None else f" (a {type(value).__name__})"
    return TypeError(f"{name} is {takes}, not {value!r}{kind}")


def check_boolean(name: str, value: object) -> None:
    """Refuses an argument that is neither True nor False. A text such as "false" would count as True.

    Raises:
        TypeError: naming the argument.
    """
    if not isinstance(value, bool):
        raise wrong_type(name, value, "True or False")


def check_number(name: str, value: object, what: str, *, optional: bool = True) -> None:
    """Refuses an argument that is no real number.

    `what` ends the phrase "a number ...", such as "of seconds"; with `optional`, None is allowed.

    Raises:
        TypeError: naming the argument.

    >>> check_number("deadline", 2.5, "of seconds"), check_number("deadline", None, "of seconds")
    (None, None)
    """
    if (value is None and optional) or (isinstance(value, Real) and not isinstance(value, bool)):
        return
    raise wrong_type(name, value, f"a number {what}{', or None' if optional else ''}")


def check_whole(name: str, value: object, what: str, *, optional: bool = True) -> None:
    """Refuses an argument that is no whole number. The arguments are those of `check_number`.

    Raises:
        TypeError: naming the argument.
    """
    if (value is None and optional) or (hasattr(type(value), "__index__") and not isinstance(value, bool)):
        return
    raise wrong_type(name, value, f"a whole number {what}{', or None' if optional else ''}")


def check_mapping(name: str, value: object, takes: str, *, texts: bool = False, secret: bool = False) -> None:
    """Refuses an argument that is neither a mapping nor None.

    Args:
        name: name of the argument.
        value: its value.
        takes: what it takes, for the message.
        texts: True if all keys and values are texts.
        secret: True if the value may hold credentials, so that the message does not repeat it.

    Raises:
        TypeError: naming the argument.
    """
    if value is None:
        return
    if secret and not isinstance(value, Mapping):
        raise TypeError(f"{name} is {takes}, not a {type(value).__name__}")
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, takes)
    for item in (part for pair in value.items() for part in pair) if texts else ():
        if not isinstance(item, str):
            raise wrong_type(f"an entry of {name}", item, "a text")


def check_texts(name: str, value: object, takes: str) -> None:
    """Refuses an argument that is neither a text, nor a list or another collection of texts, nor None.

    Raises:
        TypeError: naming the argument.
    """
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)) or iter(value) is value:
        raise wrong_type(name, value, takes)
    for item in value:
        if not isinstance(item, str):
            raise wrong_type(f"an entry of {name}", item, "a text")


def names_forms(caller: str, forms: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse some keywords with an error that names what to pass.

    Args:
        caller: name of the function, for the message.
        forms: what to pass, by keyword. The function has none of these parameters.

    >>> @names_forms("draw", {"colour": "pen=Pen(colour=...)"})
    ... def draw(*, pen: str = "") -> None: ...
    >>> draw(colour="red")
    Traceback (most recent call last):
    TypeError: draw has no argument 'colour': pass pen=Pen(colour=...)
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in forms:
                    raise TypeError(f"{caller} has no argument {name!r}: pass {forms[name]}")
            return function(*args, **kwargs)

        return call

    return decorate


def unexpanded_home(path: str, *, in_shell: bool = False) -> str | None:
    """What is wrong with a path that has a ``~``, and the advice; None for other paths.

    Only a shell expands ``~``. The operating system takes it for the name of a folder, so a program would
    write into a folder of that name in its working directory. With `in_shell`, the advice is for a command
    line, where quotes or a sign before the ``~`` kept the shell from it.

    >>> print(unexpanded_home("~/runs"))
    ~ is not expanded: pass os.path.expanduser('~/runs')
    >>> print(unexpanded_home("~/runs", in_shell=True))
    the shell did not expand ~: write $HOME/runs, or leave out the quotes
    >>> unexpanded_home("/runs/gpt~/a") is None
    True
    """
    is_home, parts = os.path.expanduser(path) != path, path.split(os.sep)
    if in_shell and (is_home or "~" in parts):
        whole = f"$HOME{path[1:]}" if parts[0] == "~" else "the whole path"
        return f"the shell did not expand ~: write {whole}, or leave out the quotes"
    if is_home:
        return f"~ is not expanded: pass os.path.expanduser({path!r})"
    if "~" in parts:
        return (
            "it has a folder named ~. Apply os.path.expanduser where the path is made, or rename the folder"
        )
    return None


def warn_of_row_major_copies(names: Sequence[str], holder: str) -> None:
    """Warns that parameters with other strides become row-major.

    Args:
        names: the parameters whose strides change; empty for no warning.
        holder: what moves the parameters.
    """
    if names:
        warnings.warn(
            f"{holder} moves {len(names)} parameters into row-major flat buffers, which changes their "
            f"strides (channels_last, for example). The first is {names[0]}. Values do not change, and "
            "kernels may be slower. Without this warning: call "
            "module.to(memory_format=torch.contiguous_format) before",
            UserWarning,
            stacklevel=4,
        )
