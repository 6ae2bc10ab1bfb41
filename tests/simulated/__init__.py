"""A simulated accelerator, for tests of code that is to run on a GPU.

It is torch's PrivateUse1 device, named "simulated", in C++ (`device.cpp`, compiled when first asked for): two
devices with streams, events, memory that the host cannot read, and page-locked memory. Where code has a race,
it is worse than a GPU: `set_delays` lets any operation be late, `held` keeps a stream from running at all.

Loading it changes `torch.accelerator` for the whole process, which is why the tests on it run in one of their
own: see `plugin.py` and `tests/unit/test_simulated_device.py`.
"""

from __future__ import annotations

from tests.simulated.building import library, why_not
from tests.simulated.module import held, load, set_delays

__all__ = ["held", "library", "load", "set_delays", "why_not"]
