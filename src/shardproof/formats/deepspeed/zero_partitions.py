"""Positions of parameters in the flat partitions of DeepSpeed's ZeRO: arithmetic without files.

Stages 1 and 2 join the parameters of a group and cut the result into one partition for each rank. Stage 3
cuts each parameter into one part for each rank, and joins the parts of a rank. Both add padding, which has no
elements of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each parameter of a group, in the order in which they lie in the flat tensor."""


@dataclass(frozen=True, slots=True)
class PartitionPart:
    """A part of a parameter in the flat tensor of a group on a rank.

    It is empty only if the parameter is empty.
    """

    rank: int
    group: int
    start: int
    """First element in the flat tensor."""
    numel: int
    at: int
    """First element in the row-major order of the parameter."""


def cut_pieces(shapes: Shapes, groups: Sequence[int], world_size: int) -> dict[str, list[PartitionPart]]:
    """The pieces of ZeRO stage 3.

    Args:
        shapes: shapes of all parameters, in order.
        groups: number of elements of each flat tensor of a rank, equal on all ranks.
        world_size: data-parallel ranks.

    Returns:
        The pieces of each parameter.

    Raises:
        ValueError: the parameters have more or fewer elements than the flat tensors.

    Example:
        >>> cut_pieces({"weight": (5,)}, [3], 2)["weight"][1]
        PartitionPart(rank=1, group=0, start=0, numel=2, at=3)
    """
    wanted = sum(-(-prod(shape) // world_size) for shape in shapes.values())
    if wanted != sum(groups):
        raise ValueError(
            f"each rank has {sum(groups)} elements in its flat tensors, expected {wanted} by the shapes of "
            f"the parameters and {world_size} ranks"
        )
    pieces: dict[str, list[PartitionPart]] = {}
    group = start = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        count = -(-numel // world_size)
        spans: list[tuple[int, int, int, int]] = []
        """Group, start in its flat tensor, elements, start in the part."""
        done = 0
        while done < count:
            if start == groups[group]:
                group, start = group + 1, 0
                continue
            taken = min(count - done, groups[group] - start)
            spans.append((group, start, taken, done))
            done, start = done + taken, start + taken
        pieces[name] = [
            PartitionPart(rank, at_group, begin, stored, rank * count + skipped)
            for rank in range(world_size)
            for at_group, begin, taken, skipped in spans
            if (stored := min(taken, numel - rank * count - skipped)) > 0
        ]
        if not numel:
            pieces[name] = [PartitionPart(0, min(group, len(groups) - 1), 0, 0, 0)]
    return pieces


def mapped_pieces(
    shapes: Shapes, group: int, slices: Sequence[Mapping[str, tuple[int, int]]]
) -> dict[str, list[PartitionPart]]:
    """The pieces of ZeRO stages 1 and 2, where each rank records them.

    Args:
        shapes: shapes of the parameters of the group, in order.
        group: number of the group.
        slices: for each rank, the first element and the number of elements of each parameter in the
            partition.

    Returns:
        The pieces of each parameter that a rank records.

    Raises:
        ValueError: two parameters overlap, a slice has no parameter, or the slices of a parameter have more
            or fewer elements than the parameter.

    Example:
        >>> mapped_pieces({"weight": (5,)}, 0, [{"weight": (0, 3)}, {"weight": (0, 2)}])["weight"][1]
        PartitionPart(rank=1, group=0, start=0, numel=2, at=3)
    """
    found: dict[str, list[PartitionPart]] = {}
    for rank, mapping in enumerate(slices):
        for (name, (start, numel)), (other, (begin, _)) in pairwise(
            sorted(mapping.items(), key=lambda item: item[1])
        ):
            if start + numel > begin:
                raise ValueError(f"{name} and {other} overlap in the partition of rank {rank}")
        for name, (start, numel) in mapping.items():
            if name not in shapes:
                raise ValueError(f"rank {rank} has a slice of {name}, which has no shape")
            before = found.setdefault(name, [])
            at = before[-1].at + before[-1].numel if before else 0
            before.append(PartitionPart(rank, group, start, numel, at))
    for name, pieces in found.items():
        numel = sum(piece.numel for piece in pieces)
        if numel != prod(shapes[name]):
            raise ValueError(
                f"{name} has {numel} elements in the partitions of all ranks, expected {prod(shapes[name])}"
            )
    return found


def joined_pieces(
    shapes: Shapes, group: int, partition: int, paddings: Sequence[int], world_size: int
) -> dict[str, list[PartitionPart]]:
    """The pieces of ZeRO stages 1 and 2, where no rank records them: parameters follow each other.

    Args:
        shapes: shapes of the parameters of the group, in order.
        group: number of the group.
        partition: number of elements of a rank's partition, including padding.
        paddings: unused elements after each parameter.
        world_size: data-parallel ranks.

    Returns:
        The pieces of each parameter.

    Raises:
        ValueError: the parameters do not fit into the partitions.

    Example:
        >>> joined_pieces({"weight": (5,)}, 0, 3, [0], 2)["weight"][1]
        PartitionPart(rank=1, group=0, start=0, numel=2, at=3)
    """
    pieces: dict[str, list[PartitionPart]] = {}
    begin = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel, at = prod(shape), 0
        pieces[name] = [] if numel else [PartitionPart(0, group, 0, 0, 0)]
        while at < numel:
            rank, start = divmod(begin + at, partition) if partition else (world_size, 0)
            if rank >= world_size:
                raise ValueError(
                    f"{name} ends past the partitions of {world_size} ranks with {partition} elements each"
                )
            taken = min(numel - at, partition - start)
            pieces[name].append(PartitionPart(rank, group, start, taken, at))
            at += taken
        begin += numel + padding
    return pieces
