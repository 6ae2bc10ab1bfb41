"""The documentation site builds without a warning, needs no network, and has every public name."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.processes]
NO_NETWORK = (
    "import socket, sys\n"
    "def refused(*arguments, **options):\n"
    "    raise OSError('the build of the site uses the network')\n"
    "socket.socket.connect = socket.getaddrinfo = refused\n"
    "from mkdocs.__main__ import cli\n"
    "cli(sys.argv[1:])\n"
)


class Page(HTMLParser):
    """What a page of the site has and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.loaded: set[str] = set()
        self.links: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a":
            self.links.add(values.get("href", ""))
        elif tag in ("script", "img", "iframe"):
            self.loaded.add(values.get("src", ""))
        elif tag == "link" and values.get("rel") != "canonical":
            self.loaded.add(values.get("href", ""))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", NO_NETWORK, "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def public_names() -> set[str]:
    """Every public name, also of members and attributes."""
    names: set[str] = set()
    for path, text in json.loads((ROOT / "tests" / "golden" / "api.json").read_text())["names"].items():
        owner, comma, _ = path.partition(", attributes")
        names |= {f"{owner}.{name}" for name in text.split(", ")} if comma else {path}
    return names


def test_every_public_name_has_a_place_in_the_reference(site: Path) -> None:
    pages = [Page(path.read_text()) for path in (site / "reference").glob("*.html")]
    names = public_names()
    assert {"shardproof.Checkpointer.restore", "shardproof.optim.DynamicLossScale.backoff"} <= names
    assert sorted(names - set().union(*(page.anchors for page in pages))) == []


@pytest.mark.parametrize("name", ["site_docstrings", "site_files"])
def test_the_examples_of_the_hooks(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"tools.{name}"))
    assert result.attempted and not result.failed


def test_sections_and_examples_of_docstrings_are_rendered(site: Path) -> None:
    page = (site / "reference" / "shardproof.layouts.html").read_text()
    for title in ("Parameters:", "Raises:"):
        assert f'doc-section-title">{title}' in page
    assert '<span class="gp">' in page  # the prompt of an example
    assert "<blockquote>" not in page  # what Markdown makes of a prompt


def test_the_pages_load_nothing_from_a_network_and_lead_to_files(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 50
    loaded = {source for page in pages.values() for source in page.loaded}
    assert [source for source in loaded if source.startswith(("http:", "https:", "//"))] == []
    for path, page in pages.items():
        for source in page.loaded | page.links:
            local = source.partition("?")[0].partition("#")[0]
            if (
                local
                and path.name != "404.html"
                and not local.startswith(("data:", "http:", "https:", "mailto:"))
            ):
                assert (path.parent / local).exists(), f"{path}: {source}"


def test_files_outside_of_docs_are_in_the_site(site: Path) -> None:
    page = site / "repository" / "examples" / "torch_loop.py.html"
    assert "checkpointer.restore(state) or 0" in Page(page.read_text()).text
    assert 'href="../repository/examples/torch_loop.py.html"' in (site / "frameworks/torch.html").read_text()
    assert 'href="repository/ARCHITECTURE.html"' in (site / "index.html").read_text()


def test_lists_and_tables_are_those_that_github_shows(site: Path) -> None:
    assert "<li><em>fence</em>: optimizer steps" in (site / "repository" / "ARCHITECTURE.html").read_text()
    assert "<code>| head</code>" in (site / "cli.html").read_text()


def test_the_search_finds_pages_and_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"]}
    assert "operate.html#after-a-crash" in places
    assert "reference/shardproof.checkpointer.html#shardproof.Checkpointer.restore" in places
    assert not any(place.startswith("repository/tests/faults") for place in places)
    assert (site / "search" / "search_index.js").is_file()  # for pages that are opened from the folder
