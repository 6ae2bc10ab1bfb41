"""Workers that end before their work does."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import types
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardproof.errors import ShardproofError
from shardproof.workers import Job, ProcessExecutor
from tests.unit.commands.cli.samples import Sample, write

UNGUARDED = """
import sys
from shardproof.report import measure_tensors
from shardproof.storage import LocalStorage

measures = measure_tensors(LocalStorage(sys.argv[1]), workers=2)
"""
GUARDED = UNGUARDED.replace("measures =", 'if __name__ == "__main__":\n    measures =')


@pytest.mark.processes
def test_a_worker_that_ends_between_two_tasks_is_an_error() -> None:
    job = Job("the test", "run it again")
    with closing(ProcessExecutor(job, types.SimpleNamespace, 1, deadline=60.0)) as executor:
        assert len(list(executor.run([repr], print))) == 1
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join(60.0)
        with pytest.raises(
            ShardproofError, match=f"exit code -{signal.SIGKILL:d} .*memory short.*run it again"
        ) as caught:
            list(executor.run([repr], print))
    assert caught.value.details["damaged"] is False


@pytest.mark.processes
def test_the_error_of_a_script_without_a_guard_names_the_guard(tmp_path: Path) -> None:
    write(tmp_path / "step", Sample({f"w{at}": np.arange(8.0) for at in range(4)}))
    for text, code in ((UNGUARDED, 1), (GUARDED, 0)):
        script = tmp_path / "script.py"
        script.write_text(text)
        ran = subprocess.run(
            [sys.executable, script, tmp_path / "step"], capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == code, ran.stderr
        if code:
            assert "ended with exit code 1 and no result. Its own error is above" in ran.stderr
            assert 'a script needs `if __name__ == "__main__":`' in ran.stderr
