"""The start of a step on one rank: data, generators and buffers, from which the step can run again.

It is packed into one tensor of bytes, without pickle. The bytes are a valid safetensors file. Its metadata
has one entry, ``plain``: the JSON of `shardproof.state.encode_plain` for the plain data, the classes of
microbatches, and the dtype, shape and device type of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from shardproof.dtypes import DTYPES
from shardproof.engine.state import RandomState, as_bytes, decode_plain, encode_plain, hoisted_tensor
from shardproof.errors import PlainDataError, StructureError
from shardproof.training.rerun.replay import ReplayableIterator, described, restored
from shardproof.training.rerun.step_run import Suspicion

_ALIGNED = 8


def pack(value: Any, path: str) -> torch.Tensor:
    """Pack a value into bytes.

    Returns:
        1-D, uint8, on the CPU.

    Raises:
        PlainDataError: the value holds another type; the message gives its path.

    >>> packed = pack({"tokens": torch.arange(3), "rows": (1, None)}, "batch")
    >>> packed.dtype, unpack(packed)
    (torch.uint8, {'tokens': tensor([0, 1, 2]), 'rows': (1, None)})
    """
    value, classes = described(value, path)
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, list[Any]] = {}

    def take(where: str, kind: str, value: Any) -> str:
        name = str(len(specs))
        tensor = hoisted_tensor(kind, value)
        dtype, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
        is_plain = tensor.layout is torch.strided and not tensor.is_meta and not hasattr(tensor, "to_local")
        if not is_plain or dtype not in DTYPES:
            raise PlainDataError(
                f"{path}.{where}: a {type(tensor).__name__} ({tensor.layout}, {dtype}, {device}) cannot be "
                "saved for a rerun. Pass a plain tensor with its values",
                path=f"{path}.{where}",
            )
        tensors[name] = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        specs[name] = [dtype, list(tensor.shape), device]
        return name

    plain = json.dumps(
        {
            "value": encode_plain(value, path, take),
            "tensors": specs,
            "classes": encode_plain(classes, path),
        }
    )
    header: dict[str, Any] = {"__metadata__": {"plain": plain}}
    end = 0
    # Gaps between tensors are not allowed, so the order by alignment aligns every tensor.
    names = sorted(tensors, key=lambda name: -DTYPES[specs[name][0]].alignment)
    for name in names:
        dtype, start = DTYPES[specs[name][0]], end
        end += tensors[name].nbytes
        shape = [*tensors[name].shape, *([dtype.parts] if dtype.parts > 1 else [])]
        header[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    head = len(text).to_bytes(_ALIGNED, "little") + text
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    parts += [as_bytes(tensors[name]) for name in names]
    return torch.cat(parts)


def unpack(packed: torch.Tensor) -> Any:
    """Unpack the value. Each tensor is placed on the current device of its original device type."""
    packed = packed.cpu()
    begin = _ALIGNED + int.from_bytes(packed[:_ALIGNED].numpy().tobytes(), "little")
    header = json.loads(packed[_ALIGNED:begin].numpy().tobytes())
    content = json.loads(header["__metadata__"]["plain"])

    def give(name: str) -> torch.Tensor:
        dtype, shape, device = content["tensors"][name]
        if dtype not in DTYPES:
            raise PlainDataError(
                f"this version of shardproof has no dtype {dtype!r}: install the version that saved the step"
            )
        start, end = header[name]["data_offsets"]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        as_bytes(tensor).copy_(packed[begin + start : begin + end])
        return tensor.to(device)

    what = "the suspicious step"
    classes = decode_plain(content.get("classes", []), give, what)  # absent in version 0.1.0
    return restored(decode_plain(content["value"], give, what), classes)


class StepState(Protocol):
    """State that a step changes and that the machine restores before it runs the step again."""

    def save(self) -> Any:
        """Return a copy of the state: plain data and tensors, in dicts, lists and tuples."""

    def restore(self, saved: Any) -> None:
        """Restore what `save` returned, in this process or in one that was started later."""


class BufferState:
    """The buffers of a module, which a forward pass may change (running statistics, counters).

    Args:
        module: any module; its buffers are copied at the beginning of each step.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> buffers = BufferState(norm)
    >>> saved = buffers.save()
    >>> _ = norm(torch.randn(4, 2))
    >>> buffers.restore(saved)
    >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
    ([0.0, 0.0], 0)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def save(self) -> dict[str, torch.Tensor]:
        """A copy of every buffer, by name."""
        return {name: buffer.detach().clone() for name, buffer in self._module.named_buffers()}

    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        """Write the copies back.

        Raises:
            StructureError: the module has other buffers than the one that was saved.
        """
        buffers = dict(self._module.named_buffers())
        if {name: buffer.shape for name, buffer in buffers.items()} != {
            name: copy.shape for name, copy in saved.items()
        }:
            raise StructureError(
                "the buffers that the suspicious step began with are not those of the module now: expected "
                f"{_shapes(buffers)}, found {_shapes(saved)}. Resume with the module as it was"
            )
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(saved[name])


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process when a step began, without the step's data."""

    generators: dict[str, Any]
    """State of the random generators, from `RandomState.state_dict`."""
    saved: list[Any]
    """The result of `save` of each `StepState`."""

    @classmethod
    def of(cls, step_state: Iterable[StepState]) -> ProcessState:
        """Save the state of this process now."""
        return cls(RandomState().state_dict(), [one.save() for one in step_state])

    def restore(self, step_state: Sequence[StepState]) -> None:
        """Restore the generators and every `StepState`.

        Raises:
            StructureError: the number of `StepState` objects differs from the number saved.
        """
        if len(step_state) != len(self.saved):
            raise StructureError(
                f"the suspicious step began with {len(self.saved)} step_state objects, and the machine has "
                f"{len(step_state)}. Make the machine with the step_state of the previous run"
            )
        for one, saved in zip(step_state, self.saved, strict=True):
            one.restore(saved)
        RandomState().load_state_dict(self.generators)


def _shapes(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "none"


Iterators = tuple[ReplayableIterator[Any], ...]


@dataclass(frozen=True, slots=True)
class StepStart:
    """Everything from which a step can run again: its data and the state of the process."""

    iterators: Iterators
    beginning: ProcessState | None
    """None for a step that is not validated: it never runs again."""

    @classmethod
    def new(cls, iterators: Iterators, step_state: Sequence[StepState], *, captured: bool) -> StepStart:
        """Begin a step with the next data of each iterator."""
        for iterator in iterators:
            iterator.advance(generators=captured)
        return cls(iterators, ProcessState.of(step_state) if captured else None)

    @classmethod
    def stored(
        cls, packed: torch.Tensor, iterators: Iterators, step_state: Sequence[StepState]
    ) -> tuple[StepStart, Suspicion | None]:
        """Begin a step from a start that another process packed.

        Raises:
            StructureError: the number of iterators or of `StepState` objects differs.
        """
        content = unpack(packed)
        microbatches, drawn = content["microbatches"], content["drawn"]
        if len(microbatches) != len(iterators):
            raise StructureError(
                f"the suspicious step took its data from {len(microbatches)} iterators, and should_run got "
                f"{len(iterators)}. Call should_run with as many iterators as the previous run"
            )
        start = cls(iterators, ProcessState(content["generators"], content["kept"]))
        for iterator, given, after in zip(iterators, microbatches, drawn, strict=True):
            iterator.load(given, after)
        start.again(step_state)
        return start, content["suspicion"] and Suspicion(**content["suspicion"])

    def again(self, step_state: Sequence[StepState]) -> None:
        """Restore the state and rewind the data to the start of the step."""
        assert self.beginning is not None
        self.beginning.restore(step_state)
        for iterator in self.iterators:
            iterator.rewind()

    def pack(self, suspicion: Suspicion | None) -> torch.Tensor:
        """Pack the start of the step, and the rejected result to compare with the rerun.

        Returns:
            1-D, uint8.

        Raises:
            PlainDataError: a checkpoint cannot hold a microbatch or a value of a `StepState`.
        """
        assert self.beginning is not None
        content = {
            "microbatches": [list(iterator.microbatches) for iterator in self.iterators],
            "drawn": [list(iterator.generators) for iterator in self.iterators],
            "generators": self.beginning.generators,
            "kept": self.beginning.saved,
            "suspicion": None if suspicion is None else asdict(suspicion),
        }
        return pack(content, "the step's beginning")


def iterators_of(data: object) -> Iterators:
    """Return the data that `should_run` got as a tuple of iterators."""
    found: Any = () if data is None else (data,) if isinstance(data, ReplayableIterator) else data
    if isinstance(found, Sequence):
        found = [one for one in found if one is not None]  # stages of a pipeline that take no data
    if not isinstance(found, list | tuple) or not all(isinstance(one, ReplayableIterator) for one in found):
        raise TypeError(
            f"should_run takes a ReplayableIterator, several in a list, or None, not {data!r:.80}: a step "
            "that runs again needs its microbatches again. Wrap it once, before the loop: "
            "ReplayableIterator(loader)"
        )
    return tuple(found)
