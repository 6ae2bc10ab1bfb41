"""The main job: train, save, die in the middle of a save, resume on other layouts, and compare every bit.

    report = run_demo(ranks=4, resume_ranks=(3, 1))
    print_report(report, rich.console.Console())

And a wrong result on one rank, which the rerun machine puts down to a device or to the data:

    report = run_fault_demo("persistent", ranks=4)
    print_fault_report(report, rich.console.Console())

Each takes one to two minutes on two cores, and starts processes of its own: they may be called anywhere.
"""

from __future__ import annotations

from shardproof.demo.fault_report import FaultReport, print_fault_report
from shardproof.demo.fault_run import run_fault_demo
from shardproof.demo.launch import DemoError
from shardproof.demo.report import DemoReport
from shardproof.demo.run import DemoEvent, run_demo
from shardproof.demo.show import print_event, print_report

__all__ = [
    "DemoError",
    "DemoEvent",
    "DemoReport",
    "FaultReport",
    "print_event",
    "print_fault_report",
    "print_report",
    "run_demo",
    "run_fault_demo",
]
