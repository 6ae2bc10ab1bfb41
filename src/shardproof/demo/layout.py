"""How many ranks hold the demo's model, and how. No torch here: the command line reads it too."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """So many data-parallel (FSDP2) by so many tensor-parallel ranks."""

    data: int
    tensor: int = 1

    @classmethod
    def widest(cls, ranks: int) -> Layout:
        """FSDP2 over 2-way tensor parallelism from 4 ranks on, where the number is even; else FSDP2 alone.

        >>> str(Layout.widest(4)), str(Layout.widest(3)), str(Layout.widest(1))
        ('4 ranks, FSDP2 2 × TP 2', '3 ranks, FSDP2', '1 rank')
        """
        return cls(ranks // 2, 2) if ranks >= 4 and ranks % 2 == 0 else cls(ranks)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.data * self.tensor

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 rank"
        if self.tensor == 1:
            return f"{self.ranks} ranks, FSDP2"
        return f"{self.ranks} ranks, FSDP2 {self.data} × TP {self.tensor}"
