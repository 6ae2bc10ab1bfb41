"""Writes the lists that `make venv` installs, with hashes: `requirements-ci.txt`, `-cpu.txt` and `-cuda.txt`.

    .venv/bin/python -m tools.ci_requirements --index URL

URL is the simple index of the registry. pip chooses the packages within `constraints.txt`. The first list has
all but torch. The second has the build of torch without CUDA, if this machine installs such a build. The
third has the registry's build, and the libraries of CUDA that it needs. A pin has the hash of every file for
Linux that the registry lists. The build without CUDA has that of the file which this machine installs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
MAIN, CPU, CUDA = (ROOT / f"requirements-{name}.txt" for name in ("ci", "cpu", "cuda"))
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
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        files = json.load(answer)["files"]
    return [file["hashes"]["sha256"] for file in files if is_for_linux(file["filename"], package.version)]


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
    """Writes both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", required=True, help="URL of the simple index of the registry")
    index = parser.parse_args().index
    here, there = chosen("torch", "hatchling", f"{ROOT}[dev]"), chosen("torch", index=index)
    torch = here.pop("torch")
    cuda = [package for name, package in there.items() if name not in here]
    for path, packages in ((MAIN, here.values()), (CUDA, cuda)):
        pins = {package.pin: {*hashes(index, package), package.sha256} for package in packages}
        path.write_text(text_of(pins))
        print(f"wrote {path}: {len(pins)} packages")
    if torch.version.local:
        CPU.write_text(text_of({torch.pin: [torch.sha256]}))
        print(f"wrote {CPU}: {torch.pin}")


if __name__ == "__main__":
    main()
