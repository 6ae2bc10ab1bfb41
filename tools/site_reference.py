"""A hook of MkDocs: pages of all public names, which `tests/golden/api.json` lists, and of the adapters.

mkdocstrings renders each name from its signature and docstring. It reads the source and imports nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "shardproof"
NAV = "reference/"
"""The entry of the navigation that stands for these pages."""


@cache
def snapshot() -> dict[str, str]:
    """The public names and what each is."""
    names: dict[str, str] = json.loads((ROOT / "tests" / "golden" / "api.json").read_text())["names"]
    return names


@cache
def modules() -> list[str]:
    """The public modules, the package first, the adapters last."""
    found = {".".join(path.split(".")[:count]) for path in snapshot() for count in (1, 2, 3)}
    facades = sorted(name for name in found if file_of(name) is not None)
    adapters = sorted(
        f"{PACKAGE}.frameworks.{path.stem}"
        for path in (ROOT / "src" / PACKAGE / "frameworks").iterdir()
        if path.stem not in ("__init__", "__pycache__") and "\n__all__ = [" in source_of(path)
    )
    return facades + adapters


def file_of(module: str) -> Path | None:
    """The file of a module, if it is one."""
    place = ROOT / "src" / module.replace(".", "/")
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def source_of(path: Path) -> str:
    """The text of a module, given as its file or folder."""
    return (path / "__init__.py" if path.is_dir() else path).read_text()


def page_of(module: str) -> str:
    """The page of a module."""
    return f"{NAV}{module}.md"


class Reference:
    """The texts of the pages.

    Args:
        package: what griffe has read of the sources.
    """

    def __init__(self, package: griffe.Module) -> None:
        self.package = package
        self.listed = {module: self._names_in(module) for module in modules()}
        """Each public module to the paths of the names in it."""
        self.first = self._first_paths()
        """Each public path to the shortest path of the same object."""
        self.place = self._places()
        """The shortest path of each object to the module whose page describes it."""
        self.described = {self.found(path).canonical_path for path in self.first}

    def found(self, path: str) -> griffe.Object | griffe.Alias:
        """The object of a public path. A function may have the name of the module that it comes from."""
        item = self.package[path.removeprefix(f"{PACKAGE}.")]
        return item[item.name] if item.is_module and snapshot().get(path) != "module" else item

    def _names_in(self, module: str) -> list[str]:
        if ".frameworks." not in module:
            inside = [path for path in snapshot() if path.rpartition(".")[0] == module]
            return [path for path in inside if "," not in path]
        adapter = self.package[module.removeprefix(f"{PACKAGE}.")]
        ours = [
            name
            for name in map(str, adapter.exports or ())  # an adapter also passes on names of its framework
            if not adapter[name].is_alias or adapter[name].target_path.startswith(f"{PACKAGE}.")
        ]
        return sorted(f"{module}.{name}" for name in ours)

    def _first_paths(self) -> dict[str, str]:
        same = defaultdict(list)
        for path in (path for listed in self.listed.values() for path in listed):
            same[self.found(path).canonical_path].append(path)
        first: dict[str, str] = {}
        for group in same.values():
            first |= dict.fromkeys(group, min(group, key=lambda path: (path.count("."), path)))
        return first

    def _places(self) -> dict[str, str]:
        """The package names what other public modules have, too. The page of that module describes it."""
        place = {path: path.rpartition(".")[0] for path in self.first.values()}
        for module, listed in self.listed.items():
            for path in listed:
                if place[self.first[path]] == PACKAGE:
                    place[self.first[path]] = module
        return place

    def page(self, module: str) -> str:
        """The text of the page of a module: all its names, then those that are described here."""
        options = "{members: false, heading_level: 1, show_root_full_path: true}"
        lines = [f"::: {module}\n    options: {options}\n", "| name | purpose |", "| --- | --- |"]
        directives = []
        for path in self.listed[module]:
            item, first = self.found(path), self.first[path]
            here = self.place[first] == module and not item.is_module
            if here:
                directives.append(self.directive(first))
            anchor = "" if item.is_module or (here and path == first) else f'<span id="{path}"></span>'
            link = f"[`{path.rpartition('.')[2]}`][{self.found(first).path}]"
            lines.append(f"| {anchor}{link} | {summary(item)} |")
        return "\n".join([*lines, "", *directives])

    def directive(self, path: str) -> str:
        """The text that renders a name. What a class inherits from a described class is a link to it."""
        item = self.found(path)
        if not item.is_class:
            anchor = "" if item.path == path else f'<span id="{path}"></span>\n\n'
            return f"{anchor}::: {item.path}\n"
        names = members_of(path) if path in snapshot() else [name for name in item.members if name[0] != "_"]
        inherited: dict[griffe.Class, list[str]] = defaultdict(list)
        for name in names:
            if name not in item.members:
                inherited[item.all_members[name].final_target.parent].append(name)
        bases = {base: base.canonical_path in self.described for base in inherited}
        shown = [name for base in inherited if not bases[base] for name in inherited[base]]
        members = [name for name in item.members if name in names] + shown
        text = f"::: {path}\n    options: {json.dumps({'members': members, 'inherited_members': shown})}\n"
        for base in (base for base in inherited if bases[base]):
            links = ", ".join(
                f'<span id="{path}.{name}"></span>[`{name}`][{base.canonical_path}.{name}]'
                for name in inherited[base]
            )
            text += f"\nInherited from [`{base.name}`][{base.canonical_path}]: {links}\n"
        return text


def members_of(path: str) -> list[str]:
    """Public members of a class of the snapshot."""
    inner = [name.removeprefix(f"{path}.") for name in snapshot() if name.startswith(f"{path}.")]
    attributes = snapshot().get(f"{path}, attributes", "").split(", ")
    return sorted({name for name in [*inner, *attributes] if name and not {".", ","} & {*name}})


def summary(item: griffe.Object | griffe.Alias) -> str:
    """The first paragraph of a docstring, for a cell of a table."""
    return " ".join(item.docstring.value.split("\n\n")[0].split()) if item.docstring else ""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the pages in the navigation, in the place of `NAV`."""
    pages = [{module.removeprefix(f"{PACKAGE}."): page_of(module)} for module in modules()]

    def filled(entry: object) -> object:
        if isinstance(entry, list):
            return [filled(one) for one in entry]
        if isinstance(entry, dict):
            return {title: filled(inner) for title, inner in entry.items()}
        return pages if entry == NAV else entry

    config.nav = filled(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    handler = config.plugins["mkdocstrings"].get_handler("python")  # it loads the package once
    reference = Reference(handler.collect(PACKAGE, handler.get_options({})))
    for module in modules():
        files.append(File.generated(config, page_of(module), content=reference.page(module)))
    return files
