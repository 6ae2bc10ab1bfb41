"""A second opinion: the digest of every whole tensor, gathered by torch and not by shardproof.

The demo proves a restore by comparing what these digests were when a checkpoint was saved with what they are
after it was loaded, perhaps on another layout. Nothing of the checkpoint path takes part: the shards are put
together by torch's own collectives, which a demo may use and a checkpoint engine may not.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["digest_of", "state_digests"]


def state_digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, int]]:
    """Name to (digest, bytes) of every parameter and every tensor of its optimizer state.

    All ranks call it together. A bit that differs changes the digest: this is equality of bits, under which
    0.0 and -0.0 are two values and nan equals itself.
    """
    found: dict[str, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        found[name] = digest_of(parameter)
        for slot, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                found[f"{name} · {slot}"] = digest_of(value)
    return found


def digest_of(tensor: Tensor) -> tuple[str, int]:
    """xxh3_128 over dtype, shape and the bytes in row-major order; and the number of bytes.

    >>> digest_of(torch.zeros(2)) == digest_of(torch.zeros(2).neg())
    False
    """
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    data = whole.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    hasher = xxhash.xxh3_128(f"{whole.dtype} {tuple(whole.shape)}".encode())
    hasher.update(data.data)
    return hasher.hexdigest(), data.nbytes
