"""How the demo's ranks hold the model and its optimizer state. No torch here: the parent needs none."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["OPTIMIZERS", "SHARDINGS", "Layout"]

OPTIMIZERS = ("adamw", "distributed", "hybrid")
"""torch's AdamW; AdamW under `optim.DistributedOptimizer`; AdamW under `optim.HybridDeviceOptimizer`."""

SHARDINGS = ("fsdp2", "flat", "none")
"""How data-parallel ranks hold the parameters: torch's FSDP2, `shardproof.fsdp`, or each rank all of them."""

_SHARDING_NAMES = {"fsdp2": "FSDP2", "flat": "flat", "none": "DP"}


@dataclass(frozen=True, slots=True)
class Layout:
    """So many data-parallel by so many tensor-parallel ranks, and what they do with their share."""

    data: int
    tensor: int = 1
    sharding: str = "fsdp2"
    """One of `SHARDINGS`."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    cpu_fraction: float = 0.5
    """Of the elements, those whose step the hybrid optimizer does on the CPU."""

    @classmethod
    def of(cls, ranks: int, sharding: str = "fsdp2", optimizer: str = "adamw") -> Layout:
        """Data-parallel ranks alone.

        Raises:
            ValueError: no such choice, or the two do not go together.
        """
        for what, value, choices in (
            ("sharding", sharding, SHARDINGS),
            ("optimizer", optimizer, OPTIMIZERS),
        ):
            if value not in choices:
                raise ValueError(f"{what} {value!r}: choose one of {', '.join(choices)}")
        if optimizer == "distributed" and sharding != "none":
            raise ValueError(
                f"the distributed optimizer shards the state of parameters that every rank has whole, and "
                f"{sharding} shards the parameters: use --optimizer distributed with --sharding none, or "
                f"--sharding {sharding} with --optimizer adamw or hybrid"
            )
        return cls(ranks, sharding=sharding, optimizer=optimizer)

    def widest(self) -> Layout:
        """As many ranks, two by two tensor parallel from 4 ranks on, where the number is even.

        >>> str(Layout(4).widest()), str(Layout(3).widest()), str(Layout(1).widest())
        ('4 ranks, FSDP2 2 × TP 2', '3 ranks, FSDP2', '1 rank')
        """
        ranks = self.ranks
        return replace(self, data=ranks // 2, tensor=2) if ranks >= 4 and ranks % 2 == 0 else self

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.data * self.tensor

    @property
    def method(self) -> str:
        """The optimizer, for a person.

        >>> Layout(2, optimizer="hybrid", cpu_fraction=0.25).method
        'hybrid, 25% on CPU'
        """
        return f"hybrid, {self.cpu_fraction:.0%} on CPU" if self.optimizer == "hybrid" else self.optimizer

    def __str__(self) -> str:
        if self.ranks == 1:
            return "1 rank"
        sharding = _SHARDING_NAMES[self.sharding]
        if self.tensor == 1:
            return f"{self.ranks} ranks, {sharding}"
        return f"{self.ranks} ranks, {sharding} {self.data} × TP {self.tensor}"
