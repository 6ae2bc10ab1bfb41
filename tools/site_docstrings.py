"""An extension of griffe for docstrings: examples become blocks of code, and names of pages become links."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent) +\S.*)*", re.MULTILINE)

PAGE = re.compile(r"(?<!`)\bdocs/(?P<page>[\w/]+)\.md(?P<anchor>#[\w-]+)?")


def linked(text: str) -> str:
    """The text with links to the pages of docs/, as pages in the folder `reference` of the site need them.

    >>> linked("See docs/tiers.md.")
    'See [docs/tiers.md](../tiers.md).'
    """
    return PAGE.sub(lambda found: f"[{found[0]}](../{found['page']}.md{found['anchor'] or ''})", text)


def fenced(text: str) -> str:
    r"""The text with a fence around each example, which ends at an empty line.

    >>> fenced("Adds.\n\n>>> 1 + 1\n2")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    return EXAMPLE.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)


class Examples(griffe.Extension):
    """Changes the docstrings of all objects."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Called for each object when the package is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(linked(obj.docstring.value))

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Called for the package itself, for which griffe does not call `on_object`."""
        self.on_object(obj=pkg, loader=loader)
