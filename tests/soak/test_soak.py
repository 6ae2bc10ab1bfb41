"""Arbitrary operations and faults: no committed step is lost, no broken one is accepted, nothing grows."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.soak.machine import Census, RunMachine

COMMON = settings(
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def test_no_committed_step_is_lost_and_no_broken_one_accepted() -> None:
    run_state_machine_as_test(
        RunMachine,
        settings=settings(COMMON, max_examples=12, stateful_step_count=15, derandomize=True),
    )
