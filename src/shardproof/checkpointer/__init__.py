"""The steps of a run."""

from shardproof.checkpointer.checkpointer import Checkpointer, PassedOver, PendingSave
from shardproof.checkpointer.retention import KeepLatest, Retention

__all__ = ["Checkpointer", "KeepLatest", "PassedOver", "PendingSave", "Retention"]
