"""`state_paths` finds the paths in a nested state dict of keys that are joined by dots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardproof.engine.foreign.state_paths import state_paths

STEPS = st.sampled_from(["model", "optim", "state", "param_groups", "0", "1", "a", "b", "exp_avg"])
KEYS = st.lists(STEPS, min_size=1, max_size=6).map(".".join)


@given(st.sets(KEYS, max_size=12), st.sets(KEYS, max_size=12))
def test_paths_spell_their_keys_and_do_not_conflict(tensors: set[str], objects: set[str]) -> None:
    paths = state_paths(sorted(tensors), sorted(objects - tensors))
    assert paths.keys() == tensors | objects
    for key, path in paths.items():
        assert ".".join(map(str, path)) == key
    inner = {path[:count] for path in paths.values() for count in range(1, len(path))}
    assert inner.isdisjoint(paths.values())


def test_without_an_optimizer_names_stay_whole() -> None:
    keys = ["layers.0.weight", "norm.weight"]
    assert state_paths(keys, ["step"]) == {**{key: (key,) for key in keys}, "step": ("step",)}


def test_deeper_prefixes_and_objects_of_the_model_and_the_optimizer() -> None:
    tensors = ["app.model.a.w", "app.model.b.c.w", "app.optim.state.a.w.m", "app.optim.state.b.c.w.m"]
    objects = ["app.model.act._extra_state", "app.optim.state.a.w.step", "app.optim.param_groups"]
    assert list(state_paths(tensors, objects).values()) == [
        ("app", "model", "a.w"),
        ("app", "model", "b.c.w"),
        ("app", "optim", "state", "a.w", "m"),
        ("app", "optim", "state", "b.c.w", "m"),
        ("app", "model", "act._extra_state"),
        ("app", "optim", "state", "a.w", "step"),
        ("app", "optim", "param_groups"),
    ]


def test_optimizer_state_by_number_and_groups_with_a_gap() -> None:
    keys = ["model.w", "optimizer.state.0.m", "optimizer.state.1.m"]
    paths = state_paths(keys, ["optimizer.param_groups.1.lr"])
    assert paths["optimizer.state.1.m"] == ("optimizer", "state", "1", "m")
    assert paths["optimizer.param_groups.1.lr"] == ("optimizer.param_groups.1.lr",)


def test_keys_that_would_be_a_value_and_a_dict_at_once_stay_whole() -> None:
    keys = ["model", "model.w", "optim.state.w.m"]
    assert state_paths(keys, []) == {key: (key,) for key in keys}
