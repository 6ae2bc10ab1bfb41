"""``python -m shardproof``: the same as the ``shardproof`` command."""

from __future__ import annotations

from shardproof.commands.cli import main

if __name__ == "__main__":
    main()
