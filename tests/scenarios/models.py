"""A small language model with the weights whose state is hardest to save.

Each block has a gated delta net, whose `in_proj` is six weights in one and whose `conv1d` is three, and a
feed-forward layer with gate and up projection fused (SwiGLU). Both are cut by heads and by hidden units under
tensor parallelism, and their layouts are declared. Gains of one element have an empty shard on all ranks but
one. `unused` never gets a gradient; `sometimes` gets one in odd steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardproof import layouts

__all__ = ["Net", "Sizes", "tokens"]


@dataclass(frozen=True)
class Sizes:
    """Three ranks divide hardly any size. Two tensor-parallel ranks divide all sizes that they must."""

    vocabulary: int = 11
    width: int = 6
    heads: int = 2
    key_width: int = 3
    value_width: int = 2
    kernel: int = 2
    hidden: int = 10
    blocks: int = 2


class _Into(torch.autograd.Function):
    """The same activations go into every tensor-parallel rank: their gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _OutOf(torch.autograd.Function):
    """Partial sums of tensor-parallel ranks are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class GatedDeltaNet(nn.Module):
    """The gated delta rule (Yang et al., 2024), one position after the other; this rank's heads of it."""

    def __init__(self, sizes: Sizes, ways: int) -> None:
        super().__init__()
        self.sizes, self.heads = sizes, sizes.heads // ways
        keys, values = self.heads * sizes.key_width, self.heads * sizes.value_width
        self.widths = [keys, keys, values, values, self.heads, self.heads]
        self.in_proj = nn.Linear(sizes.width, sum(self.widths), bias=False)
        self.conv1d = nn.Conv1d(keys + keys + values, 1, sizes.kernel, bias=False)
        self.conv1d.weight = nn.Parameter(torch.empty(keys + keys + values, 1, sizes.kernel))
        self.out_proj = nn.Linear(values, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value, gate, beta, alpha = self.in_proj(x).split(self.widths, -1)
        mixed = F.pad(torch.cat((query, key, value), -1).transpose(1, 2), (self.sizes.kernel - 1, 0))
        mixed = F.silu(F.conv1d(mixed, self.conv1d.weight, groups=mixed.shape[1])).transpose(1, 2)
        query, key, value = mixed.split(self.widths[:3], -1)
        query = F.normalize(query.reshape(batch, length, self.heads, -1), dim=-1)
        key = F.normalize(key.reshape(batch, length, self.heads, -1), dim=-1)
        value = value.reshape(batch, length, self.heads, -1)
        beta, decay = beta.sigmoid(), torch.exp(-F.softplus(alpha))
        state = x.new_zeros(batch, self.heads, self.sizes.key_width, self.sizes.value_width)
        outputs = []
        for at in range(length):
            state = state * decay[:, at, :, None, None]
            known = torch.einsum("bhk,bhkv->bhv", key[:, at], state)
            change = (value[:, at] - known) * beta[:, at, :, None]
            state = state + key[:, at, :, :, None] * change[:, :, None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, at], state))
        out = torch.stack(outputs, 1).reshape(batch, length, -1)
        return self.out_proj(out * F.silu(gate))


class SwiGLU(nn.Module):
    """Feed-forward layer gated by SiLU (Shazeer, 2020); gate and up are one weight."""

    def __init__(self, sizes: Sizes, ways: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.width, 2 * sizes.hidden // ways, bias=False)
        self.fc2 = nn.Linear(sizes.hidden // ways, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, -1)
        return self.fc2(F.silu(gate) * up)


class Gain(nn.Module):
    """A learned factor: a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self, sizes: Sizes, tensor: Any, ways: int) -> None:
        super().__init__()
        self.tensor = tensor
        self.norm = nn.RMSNorm(sizes.width)
        self.mixer = GatedDeltaNet(sizes, ways)
        self.mixer_gain = Gain()
        self.mlp = SwiGLU(sizes, ways)
        self.mlp_gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer_gain(self._parallel(self.mixer, self.norm(x)))
        return x + self.mlp_gain(self._parallel(self.mlp, x))

    def _parallel(self, part: nn.Module, x: Tensor) -> Tensor:
        if self.tensor is None:
            return part(x)
        return _OutOf.apply(part(_Into.apply(x, self.tensor)), self.tensor)


class Net(nn.Module):
    """Tokens (batch, length), int64, in; the loss of the next token out.

    Args:
        seed: of the weights, which are the same whatever the tensor-parallel size.
        tensor: the tensor-parallel process group, if any.
        sizes: of everything.
    """

    def __init__(self, seed: int, tensor: Any = None, sizes: Sizes | None = None) -> None:
        super().__init__()
        sizes = sizes or Sizes()
        ways, place = (1, 0) if tensor is None else (dist.get_world_size(tensor), dist.get_rank(tensor))
        self.unused = nn.Parameter(torch.empty(4))
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, tensor, ways) for _ in range(sizes.blocks))
        self.sometimes = nn.Parameter(torch.empty(sizes.width))
        self.head = nn.Linear(sizes.width, sizes.vocabulary)
        self._initialise(seed, sizes, ways, place)
        _declare(self, sizes, ways, place)

    @torch.no_grad()
    def _initialise(self, seed: int, sizes: Sizes, ways: int, place: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        if ways > 1:  # this rank's part of what a model without tensor parallelism has
            for name, whole in Net(seed, None, sizes).named_parameters():
                self.get_parameter(name).copy_(_part(name, whole, sizes, ways, place))
            return
        for parameter in self.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        if step % 2:
            x = x + self.sometimes
        scores = self.head(x).float()
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def tokens(step: int, first: int = 0, last: int = 6) -> Tensor:
    """The sequences [first, last) of a step's batch of 6, which is the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(Sizes.vocabulary, (6, 5), generator=generator)[first:last]


def _part(name: str, whole: Tensor, sizes: Sizes, ways: int, place: int) -> Tensor:
    """A tensor-parallel rank's part of a parameter, cut by hand: each fused part by itself."""
    keys, values = sizes.heads * sizes.key_width, sizes.heads * sizes.value_width
    fused = {
        "in_proj": [keys, keys, values, values, sizes.heads, sizes.heads],
        "conv1d": [keys, keys, values],
        "fc1": [sizes.hidden, sizes.hidden],
    }
    layer = name.split(".")[-2] if "." in name else ""
    if layer in fused:
        return torch.cat([part.chunk(ways)[place] for part in whole.split(fused[layer])])
    return whole.chunk(ways, dim=1)[place] if layer in ("out_proj", "fc2") else whole


def _declare(net: Net, sizes: Sizes, ways: int, place: int) -> None:
    here = {"rank": place, "ranks": ways}
    for block in net.blocks:
        layouts.gated_delta_net(
            block.mixer,
            key_heads=sizes.heads,
            value_heads=sizes.heads,
            key_dim=sizes.key_width,
            value_dim=sizes.value_width,
            **here,
        )
        layouts.swiglu(block.mlp, "fc1.weight", sizes.hidden, **here)
        layouts.fused(block.mlp, "fc2.weight", [sizes.hidden], dim=1, **here)
        layouts.fused(block.mixer, "out_proj.weight", [sizes.heads * sizes.value_width], dim=1, **here)
