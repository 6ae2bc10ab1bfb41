"""Names of a module's tensors in the model: without wrappers, with the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from shardproof.errors import StructureError
from shardproof.state.layout import Layout, declared

__all__ = [
    "WRAPPERS",
    "clean_name",
    "cleaner",
    "inside",
    "layouts_by_parameter",
    "layouts_in",
    "number_expert",
    "rename",
    "share",
]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Segments that compilation and activation checkpointing put into names."""
PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)

_SEGMENT = "_shardproof_segment"
_EXPERT = "_shardproof_expert"
_SHARED = "_shardproof_shared"


def rename(module: torch.nn.Module, segment: str) -> None:
    """Gives a module another segment in the keys of all below it, or with ``""`` none.

    >>> blocks = torch.nn.Sequential(torch.nn.Linear(1, 1))
    >>> rename(blocks[0], "12")
    >>> cleaner(blocks)("0.weight")
    '12.weight'
    """
    if "." in segment:
        raise StructureError(f"{segment!r} is not one segment of a key: it holds a dot")
    module.__dict__[_SEGMENT] = segment


def number_expert(module: torch.nn.Module, number: int) -> None:
    """Says that a module is one expert: keys of stacked tensors leave it out, others have its number."""
    module.__dict__[_EXPERT] = str(number)


def share(module: torch.nn.Module, name: str, key: str) -> None:
    """Says that a module's own tensor is a copy of the one that the model keeps under another key."""
    module.__dict__.setdefault(_SHARED, {})[name] = key


def inside(module: torch.nn.Module) -> torch.nn.Module:
    """What wrappers of compilation and activation checkpointing wrap, or the module itself."""
    while True:
        inner = next((module.get_submodule(name) for name in WRAPPERS if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def clean_name(name: str) -> str:
    """A name without the segments that compiling and activation checkpointing put in.

    >>> clean_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    if any(wrapper in name for wrapper in WRAPPERS):
        return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)
    return name


def cleaner(module: torch.nn.Module) -> Callable[[str], str]:
    """How names in a module read in the model.

    They have no wrappers (`clean_name`), no segment of nested data parallelism (it is called ``module``, as
    others may be, so it is known by the modules that it stands in), and what layouts say of them.
    """
    marks = _marks(module)
    return clean_name if marks is None else marks.clean


def layouts_in(module: torch.nn.Module) -> dict[str, Layout]:
    """The layouts that tensors of a module are collected and bound by, by clean name.

    A tied parameter has its layout under every name.
    """
    named = declared(module)
    if not named:
        return {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    layouts = {clean_name(name): layout for name, layout in named.items()}
    tied = {id(tensor): layouts[clean_name(name)] for name, tensor in tensors if clean_name(name) in layouts}
    for name, tensor in tensors:
        if id(tensor) in tied and clean_name(name) not in layouts:
            layouts[clean_name(name)] = replace(tied[id(tensor)], name=None)
    return layouts


def layouts_by_parameter(module: torch.nn.Module) -> dict[int, Layout]:
    """The layouts of a module's parameters, by identity."""
    layouts = layouts_in(module)
    if not layouts:
        return {}
    return {
        id(parameter): layouts[clean_name(name)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if clean_name(name) in layouts
    }


@dataclass(frozen=True, slots=True)
class _Marks:
    """What is known of names, by clean path."""

    parallel: frozenset[str]
    segments: dict[str, str]
    experts: dict[str, str]
    shared: dict[str, str]
    layouts: dict[str, Layout]

    def clean(self, name: str) -> str:
        """The name in the model."""
        full = clean_name(name)
        if full in self.shared:
            return self.shared[full]
        layout = self.layouts.get(full)
        kept: list[str] = []
        path = ""
        segments = full.split(".")
        for segment in segments[:-1]:
            inside = path
            path = f"{path}.{segment}" if path else segment
            if segment == "module" and inside in self.parallel:
                continue
            segment = self.segments.get(path, segment)
            if path in self.experts:
                segment = "" if layout is not None and layout.experts else self.experts[path]
            if segment:
                kept.append(segment)
        kept.append(layout.name if layout is not None and layout.name else segments[-1])
        return ".".join(kept)


def _marks(module: torch.nn.Module) -> _Marks | None:
    parallel: set[str] = set()
    segments: dict[str, str] = {}
    experts: dict[str, str] = {}
    shared: dict[str, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        clean, said = clean_name(path), part.__dict__
        if isinstance(part, PARALLEL):
            parallel.add(clean)
        outside, _, last = clean.rpartition(".")
        if last == "module" and outside in parallel:
            clean = outside  # what is said of a wrapped module is said of the wrapper's place
        if _SEGMENT in said:
            segments[clean] = said[_SEGMENT]
        if _EXPERT in said:
            experts[clean] = said[_EXPERT]
        shared.update((clean_name(_under(path, name)), key) for name, key in said.get(_SHARED, {}).items())
    layouts = layouts_in(module)
    if not (parallel or segments or experts or shared or layouts):
        return None
    return _Marks(frozenset(parallel), segments, experts, shared, layouts)


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
