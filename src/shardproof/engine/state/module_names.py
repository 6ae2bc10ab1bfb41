"""Names of a module's tensors in the model: without wrappers, and with the model's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from shardproof.engine.state.layout import LAYOUTS, Layout, declared, expert_of, is_divided, note_part
from shardproof.errors import StructureError

_ORIGINAL, _CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
_FLAT = "_fsdp_wrapped_module"
WRAPPERS = (_ORIGINAL, _CHECKPOINTED, _FLAT)
"""Segments that compilation, activation checkpointing and FSDP1 insert into names."""
EXTRA_STATE = "_extra_state"
"""Name in a ``state_dict`` of the value that a module's `get_extra_state` returns."""
PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)

_SEGMENT = "_shardproof_segment"
_EXPERT = "_shardproof_expert"
_SHARED = "_shardproof_shared"
_ATTRIBUTES = (_SEGMENT, _EXPERT, _SHARED)


def rename(module: torch.nn.Module, segment: str) -> None:
    """Changes a module's segment in the keys of all values below it. ``""`` removes the segment.

    Args:
        module: the module.
        segment: the new segment, without dots.

    Raises:
        StructureError: `segment` contains a dot.

    >>> blocks = torch.nn.Sequential(torch.nn.Linear(1, 1))
    >>> rename(blocks[0], "12")
    >>> NamedModule(blocks).clean("0.weight")
    '12.weight'
    """
    if "." in segment:
        raise StructureError(f"{segment!r} is not one segment of a key: it contains a dot")
    module.__dict__[_SEGMENT] = segment
    if segment.isdecimal():
        note_part()


def number_expert(module: torch.nn.Module, number: int) -> None:
    """Declares that a module is one expert.

    Keys of tensors that the model stacks over experts omit the module's segment. In other keys, the segment
    is the expert's number.

    Args:
        module: the expert.
        number: its number in the model.
    """
    module.__dict__[_EXPERT] = str(number)


def share(module: torch.nn.Module, name: str, key: str) -> None:
    """Declares that a module's own tensor is a copy of the model's tensor with another key.

    Args:
        module: the module that owns the tensor.
        name: name of the tensor in the module.
        key: key of the other tensor in the model.
    """
    module.__dict__.setdefault(_SHARED, {})[name] = key


def inside(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers of compilation, activation checkpointing and FSDP1."""
    while True:
        inner = next((module.get_submodule(name) for name in WRAPPERS if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def clean_name(name: str) -> str:
    """A name without the segments that compilation, activation checkpointing and FSDP1 insert.

    >>> clean_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    if _ORIGINAL in name or _CHECKPOINTED in name or _FLAT in name:  # faster than any()
        return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)
    return name


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers in the model of the layers and experts that have a tensor."""

    end: str
    """End of the tensor's name in the model, from the first number on that differs in the module."""
    model: tuple[frozenset[str], ...]
    """The declared numbers, each in the forms that a segment of a key may have."""
    local: str
    """The numbers in the tensor's name in the module, with dots, from the first declared one on."""

    def are_in(self, key: str, is_slot: bool) -> bool:
        """True if a key has these numbers in their order, whatever the names between them are.

        The numbers in the module do not count, nor does the position of a tensor in a list or optimizer.

        Args:
            key: the key.
            is_slot: True for the state of an optimizer.

        >>> numbers = Numbers("2.mlp.1.weight", (frozenset({"2"}),), "0.1")
        >>> keys = "layers.2.up.weight", "layers.0.mlp.1.weight", "list.2"
        >>> [numbers.are_in(key, False) for key in keys]
        [True, False, False]
        """
        name = clean_name(key)
        if f".{self.end}." in f".{name}.":
            return True
        segments = name.split(".")
        while segments and segments[-1].isdecimal():
            segments.pop()
        if is_slot and "".join(segments[-2:-1]).isdecimal():  # such as state.0.exp_avg
            return False
        forms = frozenset[str]().union(*self.model)
        found = ".".join(item for item in segments if item.isdecimal() or item in forms)
        left = iter(f".{found}.".replace(f".{self.local}.", ".", 1).split("."))
        return all(any(item in number for item in left) for number in self.model)


def declared_parts(
    parts: Sequence[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[torch.Tensor, Numbers | None]]:
    """The tensors whose names in a ``state_dict()`` are those of other tensors on other ranks.

    Args:
        parts: path and module of a module and all below it, each once.

    Yields:
        The tensor, and its numbers in the model. None if ranks divide the tensor itself, so that its name
        does not tell the part.

    >>> stage = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False)])
    >>> rename(stage[0], "6")
    >>> [numbers.end for _, numbers in declared_parts([*stage.named_modules()])]
    ['6.weight']
    """
    declared_numbers = {
        clean_name(path): number
        for path, part in parts
        if (number := part.__dict__.get(_EXPERT, part.__dict__.get(_SEGMENT, ""))).isdecimal()
    }
    for path, part in parts:
        attributes = part.__dict__
        layouts = attributes.get(LAYOUTS, {})
        if not layouts and not declared_numbers:
            continue
        tensors = {**attributes.get("_buffers", {}), **attributes.get("_parameters", {})}
        for name in tensors.keys() - attributes.get("_non_persistent_buffers_set", ()):
            layout: Layout | None = layouts.get(name)
            if not isinstance(tensors[name], torch.Tensor):
                continue
            if layout is not None and is_divided(layout):
                yield tensors[name], None
            elif numbers := _numbers(clean_name(_under(path, name)), layout, declared_numbers):
                yield tensors[name], numbers


def _numbers(name: str, layout: Layout | None, declared_numbers: Mapping[str, str]) -> Numbers | None:
    """The numbers of a tensor; None if it has those in the module.

    Args:
        name: clean name of the tensor in the module.
        layout: its declared layout.
        declared_numbers: numbers of layers and experts, by clean path.
    """
    own = ["", *name.split(".")]  # the root may have a number, too
    above = accumulate(own[1:], _under, initial="")
    model: dict[int, frozenset[str]] = {}
    end = own.copy()
    for place, (at, item) in enumerate(zip(above, own, strict=True)):
        if at in declared_numbers and not item.strip("0123456789"):
            end[place] = declared_numbers[at]
            model[place] = frozenset({end[place]})
    if layout is not None and layout.name and (expert := expert_of(layout)) is not None:
        end[-1] = f"{layout.name}{expert}"
        model[len(own) - 1] = frozenset({end[-1], str(expert)})
    if end == own:
        return None
    first = [item == other for item, other in zip(own, end, strict=True)].index(False)
    local = ".".join(item for item in own[min(model) :] if item.isdecimal())
    return Numbers(".".join(end[first:]), tuple(model.values()), local)


class NamedModule:
    """A module with the names and layouts of its tensors in the model.

    It is valid for one walk: a module may get layouts and numbers later.

    Args:
        module: the module. Wrappers outside it are not considered.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.parts = list(module.named_modules(remove_duplicate=False))
        """Path and module of all submodules. A module with two paths occurs twice."""
        self.layouts = self._layouts()
        """Declared layouts by clean name. A tied tensor has its layout under each of its names."""
        self._rules = _name_rules(self.parts, self.layouts)

    def clean(self, name: str) -> str:
        """The name in the model.

        It has no wrappers (`clean_name`) and no segment ``module`` of nested data parallelism. Other modules
        may also be called ``module``; the class of the outer module decides. Declared layouts and numbers
        change segments.
        """
        return clean_name(name) if self._rules is None else self._rules.clean(name)

    def layout(self, name: str) -> Layout | None:
        """The declared layout of the tensor of this name; None if there is none."""
        return self.layouts.get(clean_name(name)) if self.layouts else None

    def is_declared(self) -> bool:
        """True if a layout, number or shared key is declared, which the module's ``state_dict()`` lacks."""
        return bool(self.layouts) or any(
            not part.__dict__.keys().isdisjoint(_ATTRIBUTES) for _, part in self.parts
        )

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters, each under all its names. A module's own `named_parameters` takes precedence."""
        if type(self.module).named_parameters is not torch.nn.Module.named_parameters:
            yield from self.module.named_parameters(remove_duplicate=False)
            return
        for path, part in self.parts:
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield _under(path, name), parameter

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters and buffers, each under all its names."""
        yield from self.parameters()
        yield from self.module.named_buffers(remove_duplicate=False)

    def _layouts(self) -> Mapping[str, Layout]:
        named = declared(self.parts)
        if not named:
            return {}
        tensors = list(self.tensors())
        layouts = {clean_name(name): layout for name, layout in named.items()}
        tied = {
            id(tensor): layouts[clean_name(name)] for name, tensor in tensors if clean_name(name) in layouts
        }
        for name, tensor in tensors:
            if id(tensor) in tied and clean_name(name) not in layouts:
                layouts[clean_name(name)] = replace(tied[id(tensor)], name=None)
        return layouts


@dataclass(frozen=True, slots=True)
class _NameRules:
    """The changes of names, by clean path."""

    parallel: frozenset[str]
    """Paths of data parallel wrappers."""
    segments: dict[str, str]
    """Renamed segments."""
    experts: dict[str, str]
    """Numbers of experts."""
    shared: dict[str, str]
    """Keys of shared tensors."""
    layouts: Mapping[str, Layout]

    def clean(self, name: str) -> str:
        full = clean_name(name)
        if full in self.shared:
            return self.shared[full]
        layout = self.layouts.get(full)
        renamed: list[str] = []
        path = ""
        segments = full.split(".")
        for segment in segments[:-1]:
            parent = path
            path = f"{path}.{segment}" if path else segment
            if segment == "module" and parent in self.parallel:
                continue
            segment = self.segments.get(path, segment)
            if path in self.experts:
                segment = "" if layout is not None and layout.experts else self.experts[path]
            if segment:
                renamed.append(segment)
        renamed.append(layout.name if layout is not None and layout.name else segments[-1])
        return ".".join(renamed)


def _name_rules(
    parts: Iterable[tuple[str, torch.nn.Module]], layouts: Mapping[str, Layout]
) -> _NameRules | None:
    """The changes of names; None if `clean_name` is sufficient."""
    parallel: set[str] = set()
    segments: dict[str, str] = {}
    experts: dict[str, str] = {}
    shared: dict[str, str] = {}
    for path, part in parts:
        attributes = part.__dict__
        if isinstance(part, PARALLEL):
            parallel.add(clean_name(path))
        if attributes.keys().isdisjoint(_ATTRIBUTES):
            continue
        clean = clean_name(path)
        parent, _, last = clean.rpartition(".")
        if last == "module" and parent in parallel:
            clean = parent  # a declaration on a wrapped module applies to the wrapper's path
        if _SEGMENT in attributes:
            segments[clean] = attributes[_SEGMENT]
        if _EXPERT in attributes:
            experts[clean] = attributes[_EXPERT]
        keys = attributes.get(_SHARED, {})
        shared.update((clean_name(_under(path, name)), key) for name, key in keys.items())
    if not (parallel or segments or experts or shared or layouts):
        return None
    return _NameRules(frozenset(parallel), segments, experts, shared, layouts)


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
