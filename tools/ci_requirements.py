"""Writes the lists of packages with hashes: `requirements-ci.txt`, `-cpu.txt`, `-cuda.txt` and `-page.txt`.

    .venv/bin/python -m tools.ci_requirements --index URL --cpu-index URL

The first URL is the simple index of the registry, the second one that lists the builds of torch without CUDA.
pip must find such a build on this machine, and chooses all packages within `constraints.txt`. The first list
has what `make venv` installs, but torch. The second has the build of torch without CUDA. The third has the
registry's build, and the libraries of CUDA that it needs. The last has what `make test-page` adds.
A pin has the hash of every file for Linux that its index lists. Without ``--cpu-index``, the build without
CUDA has that of the file which this machine installs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
MAIN, CPU, CUDA, PAGE = (ROOT / f"requirements-{name}.txt" for name in ("ci", "cpu", "cuda", "page"))
SECONDS = 600


@dataclass(frozen=True, slots=True)
class Chosen:
    """A package that pip would install."""

    name: str
    version: Version
    sha256: str
    """Of the file that pip would install."""

    @property
    def pin(self) -> str:
        """The requirement of this version."""
        return f"{self.name}=={self.version}"


def chosen(*wanted: str, index: str | None = None) -> dict[str, Chosen]:
    """What pip would install, by name.

    Args:
        wanted: requirements.
        index: the only index; None for what pip is configured with.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    only = {"PIP_CONFIG_FILE": os.devnull, "PIP_CERT": os.environ.get("PIP_CERT", "")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
                *("--report", report, "--constraint", ROOT / "constraints.txt"),
                *(("--index-url", index) if index else ()),
                *wanted,
            ],
            env=own | {name: value for name, value in only.items() if value} if index else None,
            check=True,
            timeout=SECONDS,
        )
        entries = json.loads(report.read_text())["install"]
    found = {}
    for entry in entries:
        name = canonicalize_name(entry["metadata"]["name"])
        if name != "shardproof":
            version = Version(entry["metadata"]["version"])
            found[name] = Chosen(name, version, entry["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def hashes(index: str, package: Chosen) -> list[str]:
    """The hashes of the files for Linux that an index lists for a version."""
    request = urllib.request.Request(
        f"{index.rstrip('/')}/{package.name}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text, kind = answer.read().decode(), answer.headers.get_content_type()
    if kind == "text/html":
        page = Page()
        page.feed(text)
        files = page.files
    else:
        files = [(file["filename"], file["hashes"]["sha256"]) for file in json.loads(text)["files"]]
    return [sha256 for filename, sha256 in files if is_for_linux(filename, package.version)]


class Page(HTMLParser):
    """A page of an index in HTML. It gives names and hashes in its links.

    >>> page = Page()
    >>> page.feed('<a href="../torch-2.0%2Bcpu-cp311-cp311-linux_x86_64.whl#sha256=12ab">torch</a>')
    >>> page.files
    [('torch-2.0+cpu-cp311-cp311-linux_x86_64.whl', '12ab')]
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str]] = []
        """Name and hash of each file."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Adds the file of a link that has a hash."""
        path, _, sha256 = (dict(attrs).get("href") or "").partition("#sha256=")
        if tag == "a" and sha256:
            self.files.append((urllib.parse.unquote(path.rpartition("/")[2]), sha256))


def is_for_linux(filename: str, version: Version) -> bool:
    """True for a source archive of a version, and for its wheel if it installs on Linux.

    >>> is_for_linux("six-1.0-py3-none-any.whl", Version("1.0"))
    True
    >>> is_for_linux("six-1.0-cp311-cp311-win_amd64.whl", Version("1.0"))
    False
    """
    try:
        if filename.endswith(".whl"):
            _, found, _, tags = parse_wheel_filename(filename)
            return found == version and any("linux" in tag.platform or tag.platform == "any" for tag in tags)
        return parse_sdist_filename(filename)[1] == version
    except (InvalidWheelFilename, InvalidSdistFilename):  # an installer, or a name of earlier rules
        return False


def text_of(pins: Mapping[str, Iterable[str]]) -> str:
    """The lines of a file of requirements, from the hashes of each pin."""
    lines = ["# Written by `python -m tools.ci_requirements`. pip refuses a file with another hash."]
    for pin in sorted(pins):
        lines += [f"{pin} \\", *(f"    --hash=sha256:{digest} \\" for digest in sorted(pins[pin]))]
        lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the four files.

    Raises:
        SystemExit: pip finds no build of torch without CUDA, or the index for it lists no file of this build.
            Nothing is written.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", required=True, help="URL of the simple index of the registry")
    parser.add_argument("--cpu-index", help="URL of a simple index of builds of torch without CUDA")
    arguments = parser.parse_args()
    index = arguments.index
    here, there = chosen("torch", "hatchling", f"{ROOT}[dev]"), chosen("torch", index=index)
    page = [package for name, package in chosen("playwright").items() if name not in here]
    torch = here.pop("torch")
    if torch.version.local != "cpu":
        sys.exit(
            f"pip finds no build of torch without CUDA, but {torch.pin}: name its index in pip's settings"
        )
    builds = hashes(arguments.cpu_index, torch) if arguments.cpu_index else [torch.sha256]
    if not builds:
        sys.exit(f"{arguments.cpu_index} lists no hash of a file of {torch.pin}")
    cuda = [package for name, package in there.items() if name not in here]
    for path, packages in ((MAIN, here.values()), (CUDA, cuda), (PAGE, page)):
        pins = {package.pin: {*hashes(index, package), package.sha256} for package in packages}
        path.write_text(text_of(pins))
        print(f"wrote {path}: {len(pins)} packages")
    CPU.write_text(text_of({torch.pin: {*builds, torch.sha256}}))
    print(f"wrote {CPU}: {torch.pin}")


if __name__ == "__main__":
    main()
