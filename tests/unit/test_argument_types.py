"""A wrong type of an argument is a `TypeError` that names the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardproof as sp
from shardproof.rendezvous import LocalRendezvous


def state() -> dict[str, Any]:
    return {"w": torch.ones(4), "b": torch.ones(2)}


@pytest.fixture
def run(tmp_path: Path) -> sp.Checkpointer:
    checkpointer = sp.Checkpointer(tmp_path / "run", every=sp.Every(steps=1))
    checkpointer.save(1, state()).result()
    return checkpointer


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"metadata": "loss"}, "metadata"),
        ({"metadata": 0}, "metadata"),
        ({"overwrite": "false"}, "overwrite"),
        ({"overwrite": 1}, "overwrite"),
    ],
)
def test_a_save_names_the_argument(
    options: dict[str, Any], name: str, run: sp.Checkpointer, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=f"^{name} is "):
        sp.save(tmp_path / "one", state(), **options)
    for save in (run.save, run.save_if_due):
        with pytest.raises(TypeError, match=f"^{name} is "):
            save(2, state(), **options)
    assert run.save(2, state()).result().step == 2, "the failure is reported once"


def test_options_of_one_save_are_checked(run: sp.Checkpointer) -> None:
    with pytest.raises(TypeError, match="^suspect is "):
        run.save(2, state(), suspect="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^force is "):
        run.save_if_due(2, state(), force="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^when_busy is 'wait' or 'skip', not 'never'"):
        run.save(2, state(), when_busy="never")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": "false"}, "^strict is "),
        ({"include": 3}, "^include is "),
        ({"include": [3]}, "^an entry of include is a text"),
        ({"exclude": b"w"}, "^exclude is "),
        ({"cast": 1.5}, "^cast is "),
        ({"cast": [torch.float32]}, "^an entry of cast is a text"),
        ({"rename": [("w", "v")]}, "^rename is "),
        ({"rename": {"w": 3}}, "^an entry of rename is a text"),
    ],
)
def test_a_load_names_the_option(
    options: dict[str, Any], message: str, run: sp.Checkpointer, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=message):
        sp.load(tmp_path / "run" / "step-00000001", state(), **options)
    with pytest.raises(TypeError, match=message):
        run.restore(state(), **options)


def test_a_restore_names_suspect(run: sp.Checkpointer) -> None:
    with pytest.raises(TypeError, match="^suspect is "):
        run.restore(state(), suspect="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deadline", "60"),
        ("host_memory_budget", 1.5),
        ("host_memory_budget", "1GB"),
        ("mtbf_hours", "10"),
        ("incremental", "false"),
        ("node_local", "false"),
        ("rendezvous", "x"),
        ("second_tier", 3),
        ("storage_options", "key"),
    ],
)
def test_a_checkpointer_names_the_option(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"^{name} is "):
        sp.Checkpointer(tmp_path / "near", **{name: value})


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("full_every", "incremental=Incremental(full_every=...)"),
        ("scrub", "incremental=Incremental(scrub=...)"),
        ("replicas", "node_local=NodeLocal(replicas=...)"),
        ("then", "second_tier=..."),
        ("keep_then", "second_tier=SecondTier(LOCATION, keep=...)"),
        ("upload_bandwidth", "second_tier=SecondTier(LOCATION, bandwidth=...)"),
    ],
)
def test_an_argument_of_a_value_names_the_value(name: str, form: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError) as raised:
        sp.Checkpointer(tmp_path / "near", **{name: 1})
    assert str(raised.value) == f"Checkpointer has no argument {name!r}: pass {form}"
    for parameter, value in re.findall(r"(\w+)=(?:(\w+)\()?", form)[:1]:  # the form that it names exists
        assert parameter in inspect.signature(sp.Checkpointer).parameters
        assert not value or hasattr(sp, value)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: sp.Checkpointer(None), "root"),  # type: ignore[arg-type]
        (lambda: sp.save(None, {}), "path"),  # type: ignore[arg-type]
        (lambda: sp.load(None, {}), "path"),  # type: ignore[arg-type]
        (lambda: sp.open(3), "path"),  # type: ignore[arg-type]
        (lambda: sp.open("there", trust_pickle="no"), "trust_pickle"),  # type: ignore[arg-type]
        (lambda: sp.save("there", {}, rendezvous="x"), "rendezvous"),  # type: ignore[arg-type]
        (lambda: sp.save("there", {}, deadline="x"), "deadline"),  # type: ignore[arg-type]
        (lambda: sp.SecondTier("far", bandwidth="5MB"), "bandwidth"),  # type: ignore[arg-type]
        (lambda: sp.SecondTier(3), "the location of the second tier"),  # type: ignore[arg-type]
        (lambda: sp.Every(minutes="20"), "minutes"),  # type: ignore[arg-type]
        (lambda: sp.KeepEvery(hours="24"), "hours"),  # type: ignore[arg-type]
        (lambda: sp.Preemption(reserve=None), "reserve"),  # type: ignore[arg-type]
        (lambda: sp.Preemption(end_time="noon"), "end_time"),  # type: ignore[arg-type]
        (lambda: sp.Preemption(exit_code="85"), "exit_code"),  # type: ignore[arg-type]
    ],
)
def test_other_arguments_are_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} is "):
        call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": None}, "^source is "),
        ({"destination": 3}, "^destination is "),
        ({"include": 3}, "^include is "),
        ({"include": {"w": 1}}, "^include is "),
        ({"exclude": b"w"}, "^exclude is "),
        ({"exclude": [3]}, "^an entry of exclude is a text"),
        ({"rename": [("w", "v")]}, "^rename is "),
        ({"rename": {"w": 3}}, "^an entry of rename is a text"),
        ({"key_map": {"w": "v"}}, "^key_map is "),
        ({"max_file_bytes": "1GB"}, "^max_file_bytes is "),
        ({"max_file_bytes": 1.5}, "^max_file_bytes is "),
        ({"memory_bytes": None}, "^memory_bytes is "),
        ({"memory_bytes": "4GB"}, "^memory_bytes is "),
        ({"workers": "2"}, "^workers is "),
        ({"workers": True}, "^workers is "),
        ({"register": None}, "^register is "),
        ({"register": [3]}, "^an entry of register is a text"),
        ({"trust_pickle": "no"}, "^trust_pickle is "),
        ({"dry_run": "no"}, "^dry_run is "),
        ({"on_progress": 3}, "^on_progress is "),
        ({"rendezvous": "x"}, "^rendezvous is "),
        ({"deadline": "60"}, "^deadline is "),
    ],
)
def test_a_conversion_names_the_argument(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    place = tmp_path / "one"
    sp.save(place, state())
    arguments: dict[str, Any] = {"source": place, "destination": tmp_path / "new", "to": "safetensors"}
    with pytest.raises(TypeError, match=message):
        sp.convert(**{**arguments, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("options", [{"workers": 0}, {"on": "threads"}])
def test_a_conversion_refuses_values(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))} is "):
        sp.convert(tmp_path / "one", tmp_path / "new", to="safetensors", **options)


def test_valid_types_are_taken(tmp_path: Path, run: sp.Checkpointer) -> None:
    """A tuple, a set and a dict view of patterns, and whole numbers of numpy."""
    place = tmp_path / "run" / "step-00000001"
    for include in ("w", ("w",), {"w"}, {"w": 1}.keys()):
        assert sp.load(place, state(), include=include, exclude=["b"]).tensors == 1  # type: ignore[arg-type]
    whole = torch.tensor(1 << 30).numpy()[()]
    sp.convert(place, tmp_path / "new", to="hf", include={"w"}, max_file_bytes=whole, memory_bytes=whole)
    sp.Checkpointer(
        tmp_path, host_memory_budget=torch.tensor(1 << 20).numpy()[()], rendezvous=LocalRendezvous()
    )
