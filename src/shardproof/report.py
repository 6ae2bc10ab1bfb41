"""Contents and differences of checkpoints and runs, as values: without torch and without a terminal.

These are the public names of `shardproof.commands.report`.
"""

from shardproof.commands.report import *  # noqa: F403
from shardproof.commands.report import __all__ as __all__
