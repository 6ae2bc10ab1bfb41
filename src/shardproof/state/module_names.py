"""Names of a module's tensors in the model: without wrappers, with the model's own numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from shardproof.errors import StructureError
from shardproof.state.layout import Layout, declared

__all__ = [
    "WRAPPERS",
    "NamedModule",
    "clean_name",
    "inside",
    "number_expert",
    "rename",
    "share",
]

_ORIGINAL, _CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
WRAPPERS = (_ORIGINAL, _CHECKPOINTED)
"""Segments that compilation and activation checkpointing put into names."""
PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)

_SEGMENT = "_shardproof_segment"
_EXPERT = "_shardproof_expert"
_SHARED = "_shardproof_shared"
_SAID = (_SEGMENT, _EXPERT, _SHARED)


def rename(module: torch.nn.Module, segment: str) -> None:
    """Gives a module another segment in the keys of all below it, or with ``""`` none.

    >>> blocks = torch.nn.Sequential(torch.nn.Linear(1, 1))
    >>> rename(blocks[0], "12")
    >>> NamedModule(blocks).clean("0.weight")
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
    if _ORIGINAL in name or _CHECKPOINTED in name:  # as any() of them, in a third of the time
        return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)
    return name


class NamedModule:
    """A module, what its tensors are called in the model, and how they are laid out there.

    It holds for one walk: modules may get layouts and numbers later.

    Args:
        module: outside of which nothing is known.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.parts = list(module.named_modules(remove_duplicate=False))
        """Path and module, of all in it; a module in two places is there twice."""
        self.layouts = self._layouts()
        """By clean name: what tensors are collected and bound by. A tied one has its layout by every name."""
        self._marks = _marks(self.parts, self.layouts)

    def clean(self, name: str) -> str:
        """How a name in the module reads in the model.

        It has no wrappers (`clean_name`), no segment of nested data parallelism (it is called ``module``, as
        others may be, so it is known by the modules that it stands in), and what layouts say of it.
        """
        return clean_name(name) if self._marks is None else self._marks.clean(name)

    def layout(self, name: str) -> Layout | None:
        """The layout of the tensor of this name; None: it says it all itself."""
        return self.layouts.get(clean_name(name)) if self.layouts else None

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters, each under every name that it has; or what a module says that says it itself."""
        if type(self.module).named_parameters is not torch.nn.Module.named_parameters:
            yield from self.module.named_parameters(remove_duplicate=False)
            return
        for path, part in self.parts:
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield _under(path, name), parameter

    def layouts_by_parameter(self) -> dict[int, Layout]:
        """The layouts of the parameters, by identity."""
        if not self.layouts:
            return {}
        laid_out = ((parameter, self.layout(name)) for name, parameter in self.parameters())
        return {id(parameter): layout for parameter, layout in laid_out if layout is not None}

    def _layouts(self) -> Mapping[str, Layout]:
        named = declared(self.parts)
        if not named:
            return {}
        buffers = self.module.named_buffers(remove_duplicate=False)
        tensors: list[tuple[str, torch.Tensor]] = [*self.parameters(), *buffers]
        layouts = {clean_name(name): layout for name, layout in named.items()}
        tied = {
            id(tensor): layouts[clean_name(name)] for name, tensor in tensors if clean_name(name) in layouts
        }
        for name, tensor in tensors:
            if id(tensor) in tied and clean_name(name) not in layouts:
                layouts[clean_name(name)] = replace(tied[id(tensor)], name=None)
        return layouts


@dataclass(frozen=True, slots=True)
class _Marks:
    """What is known of names, by clean path."""

    parallel: frozenset[str]
    segments: dict[str, str]
    experts: dict[str, str]
    shared: dict[str, str]
    layouts: Mapping[str, Layout]

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


def _marks(parts: Iterable[tuple[str, torch.nn.Module]], layouts: Mapping[str, Layout]) -> _Marks | None:
    """None where names need no more than `clean_name`."""
    parallel: set[str] = set()
    segments: dict[str, str] = {}
    experts: dict[str, str] = {}
    shared: dict[str, str] = {}
    for path, part in parts:
        said = part.__dict__
        if isinstance(part, PARALLEL):
            parallel.add(clean_name(path))
        if said.keys().isdisjoint(_SAID):
            continue
        clean = clean_name(path)
        outside, _, last = clean.rpartition(".")
        if last == "module" and outside in parallel:
            clean = outside  # what is said of a wrapped module is said of the wrapper's place
        if _SEGMENT in said:
            segments[clean] = said[_SEGMENT]
        if _EXPERT in said:
            experts[clean] = said[_EXPERT]
        shared.update((clean_name(_under(path, name)), key) for name, key in said.get(_SHARED, {}).items())
    if not (parallel or segments or experts or shared or layouts):
        return None
    return _Marks(frozenset(parallel), segments, experts, shared, layouts)


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
