"""Works on stored checkpoints without a state: verifies, repairs, and makes standalone copies.

These are the public names of `shardproof.runs.maintenance`.
"""

from shardproof.runs.maintenance import *  # noqa: F403
from shardproof.runs.maintenance import __all__ as __all__
