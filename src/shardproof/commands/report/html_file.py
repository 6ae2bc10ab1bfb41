"""The facts of a page as bytes: JSON, or one HTML file that needs no other file and no network.

Note "Nothing in a checkpoint can run": the facts stand in a data block, in which no character can end the
block. The script makes text nodes of them. The policy of the page lets only this script run, by its digest,
and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

from shardproof._utils.humanize import printable

HTML_START = b'<!doctype html>\n<html lang="en" data-program="shardproof">\n'
JSON_START = b'{\n "page": "'
"""The first bytes of every file that `html_of` and `json_of` make."""

_SCRIPTS = ("parts", "run", "checkpoint", "difference", "start")
"""The files of the script, in order."""
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}
"""The characters with a meaning in HTML. `json.dumps` escapes all that are not ASCII."""


def json_of(facts: dict[str, Any]) -> bytes:
    """The facts of a page as JSON."""
    return json.dumps(facts, indent=1, allow_nan=False).encode() + b"\n"


def html_of(facts: dict[str, Any]) -> bytes:
    """The page of facts, as ASCII.

    >>> page = html_of({"page": "run", "location": "</script>", "steps": []})
    >>> page.startswith(HTML_START), page.count(b"</script>")
    (True, 2)
    """
    folder = files(__package__) / "script"
    style = folder.joinpath("page.css").read_text("ascii")
    parts = [folder.joinpath(f"{name}.js").read_text("ascii") for name in _SCRIPTS]
    script = "\n".join(['"use strict";\n{', *parts, "}\n"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(facts, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)
    title = html.escape(f"shardproof: {printable(facts['location'])}")
    pieces = (
        '<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n',
        f"<style>\n{style}</style>\n</head>\n<body>\n",
        "<noscript>The script of this page draws it, and is not allowed to run here. "
        "<code>shardproof page --json</code> prints the same facts.</noscript>\n",
        f'<script type="application/json" id="facts">{data}</script>\n',
        f"<script>{script}</script>\n</body>\n</html>\n",
    )
    return HTML_START + "".join(pieces).encode("ascii", "xmlcharrefreplace")
