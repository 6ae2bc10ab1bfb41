"""A hook of MkDocs: the pages of docs/ link to files of the repository, and the site has these files.

The links of all pages are those that hold in the repository. README.md is the first page of the site, and a
file of docs/ keeps its path there. Every other linked file is below `repository/`: a page as it is, other
text as code in a page.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
HOME = "README.md"
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[#)])")
BLOCKS = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
CODE_OF_CELL = re.compile(r"`[^`\n]*\\\|[^`\n]*`(?=.*\|$)", re.MULTILINE)
NESTED = re.compile(r"^ {2,3}(?=(?:-|\d+\.) )", re.MULTILINE)
FENCE = "~" * 12
LANGUAGES = {".py": "python", ".sbatch": "bash", ".json": "json"}


def in_site(path: str) -> str:
    """Where the site has a file of the repository, relative to the root of its sources.

    >>> [in_site(path) for path in ("README.md", "docs/cli.md", "SECURITY.md", "examples/dcp.py")]
    ['index.md', 'cli.md', 'repository/SECURITY.md', 'repository/examples/dcp.py.md']
    """
    if path == HOME:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def in_repository(uri: str) -> str:
    """The inverse of `in_site`.

    >>> [in_repository(uri) for uri in ("index.md", "cli.md", "repository/SECURITY.md")]
    ['README.md', 'docs/cli.md', 'SECURITY.md']
    """
    if uri == "index.md":
        return HOME
    if uri.startswith("repository/"):
        return uri.removeprefix("repository/")
    return f"docs/{uri}"


def targets(text: str, page: str) -> Iterator[str]:
    """Repository paths of the files that a page of the repository links to."""
    for match in LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(page), match["path"]))


def linked_files(pages: list[str]) -> list[str]:
    """The pages, and every file outside of docs/ that they or other linked pages link to."""
    found = dict.fromkeys(pages)
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for target in targets((ROOT / page).read_text(), page):
            if target not in found and not target.startswith("docs/") and (ROOT / target).is_file():
                found[target] = None
                waiting += [target] if target.endswith(".md") else []
    return list(found)


def as_page(path: str) -> str:
    """The text of the page of a file."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# `{path}`\n\n{FENCE}{language}\n{text}{FENCE}\n"


def as_python_markdown(text: str) -> str:
    r"""The text where GitHub's Markdown and that of the site differ, apart from blocks of code.

    A list inside of an item is indented by four columns, and code in a cell of a table has no backslash.

    >>> as_python_markdown("- a\n  - b"), as_python_markdown(r"| `a \| b` |")
    ('- a\n    - b', '| `a | b` |')
    """
    return NESTED.sub("    ", CODE_OF_CELL.sub(lambda code: code[0].replace(r"\|", "|"), text))


def named(nav: object) -> Iterator[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    elif nav:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from named(entry)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of the repository that pages link to."""
    pages = [in_repository(file.src_uri) for file in files.documentation_pages()]
    in_nav = set(named(config.nav))
    for path in linked_files([HOME, *pages]):
        if path not in pages:
            added = File.generated(config, in_site(path), content=as_page(path))
            if added.src_uri not in in_nav:
                added.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes the links of a page relative to its place in the site."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown  # made for the site
    here = posixpath.dirname(in_repository(uri))

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match["path"]))
        if not (ROOT / target).is_file():
            return match["path"]  # MkDocs reports it
        return posixpath.relpath(in_site(target), posixpath.dirname(uri) or ".")

    return "".join(
        part if part.startswith("```") else as_python_markdown(LINK.sub(moved, part))
        for part in BLOCKS.split(markdown)
    )
