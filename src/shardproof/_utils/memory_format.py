"""Warns of memory formats that flat buffers do not have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence


def warn_of_row_major_copies(names: Sequence[str], holder: str) -> None:
    """Warns that parameters with other strides become row-major.

    Args:
        names: the parameters whose strides change; empty for no warning.
        holder: what moves the parameters.
    """
    if names:
        warnings.warn(
            f"{holder} moves {len(names)} parameters into row-major flat buffers, which changes their "
            f"strides (channels_last, for example). The first is {names[0]}. Values do not change, and "
            "kernels may be slower. Without this warning: call "
            "module.to(memory_format=torch.contiguous_format) before",
            UserWarning,
            stacklevel=4,
        )
