"""The rooms of the source: the wings and the packages in them, and the public modules that lead there.

A room is a package of a wing, a module on the ground floor, or a wing that is one package (`formats`,
`frameworks`). ARCHITECTURE.md describes each.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardproof"

GROUND = ("version", "_utils", "errors", "reentrance", "dtypes", "workers")

WINGS = {
    "engine": (
        "events",
        "geometry",
        "state",
        "planning",
        "rendezvous",
        "storage",
        "format",
        "foreign",
        "saving",
        "loading",
    ),
    "training": ("collectives", "layouts", "optim", "fsdp", "rerun"),
    "formats": ("conversion",),
    "runs": ("maintenance", "checkpointer"),
    "frameworks": (),
    "commands": ("report", "cli"),
}
"""Each wing, from the ground up, with its packages, from the ground up. `formats` and `frameworks` are rooms
themselves."""

FACADES = {
    "checkpointer": "runs.checkpointer",
    "cli": "commands.cli",
    "events": "engine.events",
    "events.otel": "engine.events.otel",
    "events.prometheus": "engine.events.prometheus",
    "events.tensorboard": "engine.events.tensorboard",
    "fsdp": "training.fsdp",
    "geometry": "engine.geometry",
    "layouts": "training.layouts",
    "layouts.experts": "training.layouts.experts",
    "loading": "engine.loading",
    "maintenance": "runs.maintenance",
    "optim": "training.optim",
    "rendezvous": "engine.rendezvous",
    "report": "commands.report",
    "rerun": "training.rerun",
    "state": "engine.state",
    "storage": "engine.storage",
    "storage.conformance": "engine.storage.conformance",
}
"""Each public module that only names what programs use, and the module that has it."""

PUBLIC = "public"
"""The room of all of `FACADES`. No wing imports it."""


def rooms(wing: str) -> tuple[str, ...]:
    """The rooms of a wing, from the ground up."""
    own = (wing,) if wing in ("formats", "frameworks") else ()
    return (*own, *(f"{wing}.{package}" for package in WINGS[wing]))


def room_of_module(module: str) -> str:
    """The room of a module, given without ``shardproof.``; "" for the package itself."""
    first, _, rest = module.partition(".")
    if module in FACADES:
        return PUBLIC
    inner = rest.partition(".")[0]
    if inner in WINGS.get(first, ()):
        return f"{first}.{inner}"
    return "" if first == "__init__" else first


def room_of(path: Path) -> str:
    """The room of a file."""
    return room_of_module(module_of(path))


def module_of(path: Path) -> str:
    """The module of a file, without ``shardproof.``; "" for the package itself."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
