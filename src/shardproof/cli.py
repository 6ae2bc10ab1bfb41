"""The command line: ``shardproof`` and ``python -m shardproof``.

These are the public names of `shardproof.commands.cli`.
"""

from __future__ import annotations

from shardproof.commands.cli import main

__all__ = ["main"]
