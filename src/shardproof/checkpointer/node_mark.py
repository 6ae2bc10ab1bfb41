"""The file that marks a folder as that of one node, with the files of that node only.

Note "A mark for people and commands": `Checkpointer` writes it into the folder of each node, and does not
rely on it: it asks the present nodes for their files. Commands read it, because without it a step whose files
are on several nodes looks like one that lost files.
"""

from __future__ import annotations

import msgspec

from shardproof.checkpointer.step_marks import read_mark
from shardproof.storage import Storage

__all__ = ["NodeMark", "read_node_mark", "write_node_mark"]

_NAME = "node.json"


class NodeMark(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of the last job that used a folder with ``node_local=True``.

    Example:
        >>> print(NodeMark(nodes=("a:/nvme/run", "b:/nvme/run"), own=0, replicas=0).sentence)
        this folder is that of one of 2 nodes: files of the other nodes (b:/nvme/run) are not here
    """

    nodes: tuple[str, ...]
    """Host and folder of each node."""
    own: int
    """The node of this folder."""
    replicas: int

    @property
    def sentence(self) -> str:
        """The meaning of the mark, for messages."""
        others = [name for number, name in enumerate(self.nodes) if number != self.own]
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return (
            f"this folder is that of one of {len(self.nodes)} nodes: files of the other nodes "
            f"({', '.join(others[:3])}{more}) are not here"
        )


def read_node_mark(run: Storage) -> NodeMark | None:
    """The mark of a run's folder; None if it is not that of one of several nodes."""
    data = read_mark(run, _NAME)
    if data is None:
        return None
    try:
        mark = msgspec.json.decode(data, type=NodeMark)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return mark if len(mark.nodes) > 1 else None


def write_node_mark(run: Storage, mark: NodeMark) -> None:
    """Writes the mark into a run's folder, if it has another one or none."""
    data = msgspec.json.encode(mark) + b"\n"
    if run.size(_NAME) != len(data) or run.read(_NAME) != data:
        run.publish(_NAME, data, replace=True)
