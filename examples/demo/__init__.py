"""Two demonstrations: recovery from a kill, and attribution of a wrong result.

    report = run_demo(ranks=4, resume_ranks=(3, 1))
    print_report(report, rich.console.Console())

`run_demo` trains, kills the job in the middle of a save, resumes on other layouts and compares every bit.

    report = run_fault_demo("persistent", ranks=4)
    print_fault_report(report, rich.console.Console())

`run_fault_demo` injects a wrong result on one rank. The rerun machine attributes it to a device or to the
data.

Each takes one to two minutes on two cores. Both start separate processes, so any program may call them.
"""

from __future__ import annotations

from examples.demo.evidence import DemoReport
from examples.demo.fault_run import FaultReport, run_fault_demo
from examples.demo.launch import DemoError
from examples.demo.run import DemoEvent, run_demo
from examples.demo.show import print_event, print_fault_report, print_report

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
