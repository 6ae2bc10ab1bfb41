"""A simulated accelerator, for tests of code that runs on a GPU.

It is torch's PrivateUse1 device, named "simulated", in C++ (`device.cpp`, compiled at first use): two devices
with streams, events, memory that the host cannot read, and page-locked memory. It shows races more often than
a GPU does: `set_delays` delays operations at random, and `held` stops a stream.

Loading it changes `torch.accelerator` for the whole process. So its tests run in a process of their own: see
`plugin.py` and `tests/unit/test_simulated_device.py`.
"""

from __future__ import annotations

from tests.simulated.building import library, why_not
from tests.simulated.module import held, load, set_delays

__all__ = ["held", "library", "load", "set_delays", "why_not"]
