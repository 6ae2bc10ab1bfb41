"""Random generators: the global ones of the process, and generator objects in the tree."""

from __future__ import annotations

import random
from typing import Any, Literal

import numpy as np
import torch

from shardproof._utils.accelerator import available_accelerator
from shardproof.engine.state.handlers.stateful_objects import Stateful


class RandomState:
    """The global random generators of this process: Python's, numpy's, torch's on CPU and accelerator.

    Each rank stores and restores its own generators. A load on more ranks than saved leaves those of the
    additional ranks unchanged, or fails with ``missing="error"``. A load on fewer ranks drops the other
    states: `LoadReport.dropped` and a warning name them.

    Args:
        missing: for a rank that did not save: "keep" leaves its generators unchanged, "error" reports the key
            as missing.

    >>> rng = RandomState()
    >>> state = rng.state_dict()
    >>> before = torch.rand(1)
    >>> rng.load_state_dict(state)
    >>> bool(torch.rand(1) == before)
    True
    """

    def __init__(self, *, missing: Literal["keep", "error"] = "keep") -> None:
        self.missing = missing

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators. It does not change."""
        module, accelerator = _accelerator(), None
        if module is not None and hasattr(module, "device_count"):
            devices = [module.get_rng_state(index) for index in range(module.device_count())]
            accelerator = {"current": module.current_device(), "devices": devices}
        elif module is not None:
            accelerator = {"current": 0, "devices": [module.get_rng_state()]}
        return {
            "python": _python_state(random),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "accelerator": accelerator,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators to a state that `state_dict` returned."""
        _set_python_state(random, state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"].cpu())
        _set_accelerator_state(state["accelerator"])


def _python_state(generator: Any) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, np.uint32), "gauss": gauss}


def _set_python_state(generator: Any, state: dict[str, Any]) -> None:
    generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def _accelerator() -> Any:
    """The device module of the accelerator; None if there is none or the process has not used it."""
    device = available_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return None
    # Reading the generator would initialise a device that the process does not use.
    return module if getattr(module, "is_initialized", lambda: True)() else None


def _set_accelerator_state(state: dict[str, Any] | None) -> None:
    """Sets each device's generator. The current device gets the state of the saved rank's current device."""
    module = _accelerator()
    if module is None or state is None:
        return
    if not hasattr(module, "device_count"):
        module.set_rng_state(state["devices"][state["current"]].cpu())
        return
    for index, stored in enumerate(state["devices"][: module.device_count()]):
        module.set_rng_state(stored.cpu(), index)
    module.set_rng_state(state["devices"][state["current"]].cpu(), module.current_device())


GENERATOR = Stateful(
    lambda generator: generator.get_state(), lambda generator, state: generator.set_state(state.cpu())
)
NUMPY_GENERATOR = Stateful(
    lambda generator: generator.bit_generator.state,
    lambda generator, state: setattr(generator.bit_generator, "state", state),
)
NUMPY_RANDOM_STATE = Stateful(
    lambda generator: generator.get_state(legacy=False),
    lambda generator, state: generator.set_state(state),
)
PYTHON_GENERATOR = Stateful(_python_state, _set_python_state)
