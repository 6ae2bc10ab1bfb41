"""Reruns a step with a suspicious result, to distinguish a faulty device from a bad batch.

These are the public names of `shardproof.training.rerun`.
"""

from shardproof.training.rerun import *  # noqa: F403
from shardproof.training.rerun import __all__ as __all__
