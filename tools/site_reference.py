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


def members_of(path: str) -> list[str]:
    """Public members of a class, in the order of their names."""
    inner = [name.removeprefix(f"{path}.") for name in snapshot() if name.startswith(f"{path}.")]
    attributes = snapshot().get(f"{path}, attributes", "").split(", ")
    return sorted({name for name in [*inner, *attributes] if name and "." not in name and ", " not in name})


def top_level(package: griffe.Module) -> dict[str, list[str]]:
    """Each public module to the paths of the names in it."""
    paths: dict[str, list[str]] = {module: [] for module in modules()}
    for path in snapshot():
        module = path.rpartition(".")[0]
        if module in paths and "," not in path:
            paths[module].append(path)
    for module in paths:
        if ".frameworks." in module:
            adapter = package[module.removeprefix(f"{PACKAGE}.")]
            paths[module] = sorted(
                f"{module}.{name}" for name in map(str, adapter.exports or ()) if is_ours(adapter[name])
            )
    return paths


def found(path: str, package: griffe.Module) -> griffe.Object | griffe.Alias:
    """The object of a public path. A function may have the name of the module that it comes from."""
    item = package[path.removeprefix(f"{PACKAGE}.")]
    return item[item.name] if item.is_module and snapshot().get(path) != "module" else item


def is_ours(item: griffe.Object | griffe.Alias) -> bool:
    """True if the package defines an object; an adapter also passes on names of its framework."""
    return not item.is_alias or item.target_path.startswith(f"{PACKAGE}.")


def homes(paths: dict[str, list[str]], package: griffe.Module) -> dict[str, str]:
    """Each public path to the first path of the same object: the shortest one."""
    same = defaultdict(list)
    for path in (path for listed in paths.values() for path in listed):
        same[found(path, package).canonical_path].append(path)
    first = {}
    for group in same.values():
        group.sort(key=lambda path: (path.count("."), path))
        first |= dict.fromkeys(group, group[0])
    return first


def page_of(module: str) -> str:
    """The page of a module."""
    return f"{NAV}{module}.md"


def places(paths: dict[str, list[str]], first: dict[str, str]) -> dict[str, str]:
    """Each object, by its first path, to the module whose page describes it.

    The package names what other public modules have, too. The page of that module describes it.
    """
    place = {path: path.rpartition(".")[0] for path in first.values()}
    for module, listed in paths.items():
        for path in listed:
            if place[first[path]] == PACKAGE:
                place[first[path]] = module
    return place


def directive(path: str, package: griffe.Module, public: set[str]) -> str:
    """The text that renders a name. What a class inherits from a public class is a link to it."""
    item = found(path, package)
    if not item.is_class:
        anchor = "" if item.path == path else f'<span id="{path}"></span>\n\n'
        return f"{anchor}::: {item.path}\n"
    names = members_of(path)
    inherited: dict[griffe.Class, list[str]] = defaultdict(list)
    for name in names:
        if name not in item.members:
            inherited[item.all_members[name].final_target.parent].append(name)
    shown = [
        name for parent in inherited if parent.canonical_path not in public for name in inherited[parent]
    ]
    own = [name for name in item.members if name in names]
    text = f"::: {path}\n    options: {json.dumps({'members': own + shown, 'inherited_members': shown})}\n"
    for parent, listed in inherited.items():
        if parent.canonical_path in public:
            links = ", ".join(
                f'<span id="{path}.{name}"></span>[`{name}`][{parent.canonical_path}.{name}]'
                for name in listed
            )
            text += f"\nInherited from [`{parent.name}`][{parent.canonical_path}]: {links}\n"
    return text


def summary(item: griffe.Object | griffe.Alias) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    return " ".join(item.docstring.value.split("\n\n")[0].split()) if item.docstring else ""


def page(module: str, paths: dict[str, list[str]], package: griffe.Module) -> str:
    """The text of the page of a module: all its names, then those that are described here."""
    first = homes(paths, package)
    place = places(paths, first)
    public = {found(path, package).canonical_path for path in first}
    options = "{members: false, heading_level: 1, show_root_full_path: true}"
    lines = [f"::: {module}\n    options: {options}\n", "| name | purpose |", "| --- | --- |"]
    described = []
    for path in paths[module]:
        name, item = path.rpartition(".")[2], found(path, package)
        here = place[first[path]] == module and not item.is_module
        described += [first[path]] * here
        anchor = "" if item.is_module or (here and path == first[path]) else f'<span id="{path}"></span>'
        lines.append(f"| {anchor}[`{name}`][{found(first[path], package).path}] | {summary(item)} |")
    directives = [directive(path, package, public) for path in described]
    return "\n".join([*lines, "", *directives])


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
    package = handler.collect(PACKAGE, handler.get_options({}))
    paths = top_level(package)
    for module in modules():
        files.append(File.generated(config, page_of(module), content=page(module, paths, package)))
    return files
