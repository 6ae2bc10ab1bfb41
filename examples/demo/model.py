"""The demo's model, a small decoder-only transformer over bytes, and its data loader.

The model uses RMSNorm, rotary positions, grouped-query attention and SwiGLU. Two details stress the
checkpoint: no number of ranks divides the hidden width evenly, and the one-element gains have empty shards on
all ranks but one.

The batch of a step is a function of only the seed and the step. A rank takes its rows of that batch. So runs
on different numbers of ranks train on the same bytes at the same step, and their losses are comparable.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ModelSize", "TextLoader", "Transformer"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a `Transformer`."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 346
    """Width of the feed-forward layers. Halved by tensor parallelism it is 173, which FSDP2 cuts unevenly."""
    context: int = 128
    """Positions that the rotary tables cover."""


class RMSNorm(nn.Module):
    """Scale to unit root mean square, then by a learned weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Gain(nn.Module):
    """A learned factor on a residual branch: a parameter of one element."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    The number of heads is read from the activations, so a tensor-parallel rank that holds some of the rows of
    the projections computes its own heads with the same code.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.query = nn.Linear(size.width, size.heads * self.head_width, bias=False)
        self.key = nn.Linear(size.width, size.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(size.width, size.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(size.heads * self.head_width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        key = self.key(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        value = self.value(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return joined


class SwiGLU(nn.Module):
    """Feed-forward layer, gated by SiLU (Shazeer, 2020)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        narrowed: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return narrowed


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and a gain."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.width)
        self.attention = Attention(size)
        self.attention_gain = Gain(1.0)
        self.mlp_norm = RMSNorm(size.width)
        self.mlp = SwiGLU(size)
        self.mlp_gain = Gain(1.0)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention_gain(self.attention(self.attention_norm(x), cos, sin))
        out: Tensor = x + self.mlp_gain(self.mlp(self.mlp_norm(x)))
        return out


class Transformer(nn.Module):
    """Bytes in, scores for the next byte out.

    >>> size = ModelSize(width=32, layers=1, heads=2, kv_heads=1, hidden=48, context=16)
    >>> Transformer(size, seed=0)(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 256])
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, size: ModelSize, *, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        cos, sin = _rotary_tables(size.context, size.width // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(size, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, size: ModelSize, generator: torch.Generator) -> None:
        """Draw the weights from a separate generator, so that every layout starts from the same weights."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deviation = 0.02 if "embedding" in name else parameter.shape[1] ** -0.5
                residual = name.endswith(("out.weight", "down.weight"))
                parameter.normal_(0.0, deviation / (2 * size.layers) ** (0.5 * residual), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (batch, length, vocabulary) of the byte after each of `tokens` (batch, length), int64."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        scores: Tensor = self.head(self.norm(x))
        return scores


def _rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency[None, :]
    return angle.cos().float(), angle.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turn the pair (first half, second half) by the position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class TextLoader:
    """Shuffled windows of a text, epoch after epoch.

    Args:
        text: the bytes to train on.
        batch: windows in the batch of a step, over all ranks.
        length: predicted bytes in a window.
        rows: ``(part, parts)``: this rank takes part number `part` of `parts` nearly equal parts of each
            batch.
        seed: seed of the order.

    The state is equal on all ranks: seed, number of windows read, and a digest of the text, because a
    position is only valid in the same text.

    >>> loader = TextLoader(bytes(range(200)), batch=2, length=8)
    >>> _ = loader.next()
    >>> resumed = TextLoader(bytes(range(200)), batch=2, length=8, seed=5)
    >>> resumed.load_state_dict(loader.state_dict())
    >>> bool((resumed.next()[0] == loader.next()[0]).all())
    True
    """

    def __init__(
        self, text: bytes, *, batch: int, length: int, rows: tuple[int, int] = (0, 1), seed: int = 0
    ) -> None:
        self._bytes = np.frombuffer(text, dtype=np.uint8)
        self._windows = (len(text) - 1) // length
        if self._windows < batch:
            raise ValueError(
                f"the text has {len(text)} bytes, too few for one batch of {batch} windows of {length + 1} "
                f"bytes: use a text of at least {batch * length + 1} bytes"
            )
        self._batch = batch
        self._length = length
        part, parts = rows
        self._rows = range(part * batch // parts, (part + 1) * batch // parts)
        self._digest = hashlib.sha256(text).hexdigest()
        self._seed = seed
        self._taken = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """This rank's rows of the next batch: bytes and the bytes that follow them, int64 (rows, length)."""
        starts = np.array([self._start(self._taken + row) for row in self._rows], dtype=np.int64)
        self._taken += self._batch
        window = self._bytes[starts[:, None] + np.arange(self._length + 1)]
        both = torch.from_numpy(window.astype(np.int64))
        return both[:, :-1], both[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader."""
        return {"seed": self._seed, "taken": self._taken, "text": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of another loader."""
        if state["text"] != self._digest:
            raise ValueError(
                f"the saved position is in another text (digest {state['text'][:12]}) than this loader's "
                f"({self._digest[:12]}): resume with the text of the first run"
            )
        self._seed = state["seed"]
        self._taken = state["taken"]

    def _start(self, window: int) -> int:
        epoch, index = divmod(window, self._windows)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._windows)
        return int(order[index]) * self._length
