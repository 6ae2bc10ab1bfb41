"""The main job: train, save, die in the middle of a save, resume on other layouts, and compare every bit.

    report = run_demo(ranks=4, resume_ranks=(3, 1))
    print_report(report, rich.console.Console())

It takes one to two minutes on two cores, and starts processes of its own: `run_demo` may be called anywhere.
"""

from __future__ import annotations

from shardproof.demo.launch import DemoError
from shardproof.demo.report import DemoReport
from shardproof.demo.run import DemoEvent, run_demo
from shardproof.demo.show import print_event, print_report

__all__ = ["DemoError", "DemoEvent", "DemoReport", "print_event", "print_report", "run_demo"]
