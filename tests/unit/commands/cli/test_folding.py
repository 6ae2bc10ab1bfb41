"""Folding: a row spells exactly the keys that it stands for."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from shardproof.commands.report.summary import fold, index_ranges


def spelled_keys(pattern: str) -> list[str]:
    """The keys that a pattern stands for."""
    choices: list[list[str]] = []
    for part in re.split(r"(\{[^}]*\})", pattern):
        if not part.startswith("{"):
            choices.append([part])
            continue
        numbers: list[str] = []
        for span in part[1:-1].split(","):
            first, _, last = span.partition("..")
            numbers += map(str, range(int(first), int(last or first) + 1))
        choices.append(numbers)
    return ["".join(words) for words in itertools.product(*choices)]


words = st.sampled_from(["a", "b", "0", "1", "2", "3", "7", "10", "007", "²"])
keys = st.lists(words, min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(keys, st.sampled_from("xy")))
def test_rows_spell_the_keys_once_each(labels: dict[str, str]) -> None:
    rows = fold(labels.items())
    found = [(key, row.label) for row in rows for key in spelled_keys(row.pattern)]
    assert sorted(found) == sorted(labels.items())
    assert [len(spelled_keys(row.pattern)) for row in rows] == [row.count for row in rows]


def test_layers_fold_in_the_order_of_their_first_key() -> None:
    keys = [f"layers.{layer}.{name}" for layer in range(32) for name in ("wq", "wk")]
    rows = fold((key, None) for key in ["embed", *keys, "head"])
    assert [row.pattern for row in rows] == ["embed", "layers.{0..31}.wq", "layers.{0..31}.wk", "head"]
    assert [row.count for row in rows] == [1, 32, 32, 1]


def test_two_levels_fold_to_one_row_only_where_every_combination_is_there() -> None:
    keys = [f"layers.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(4)]
    assert [row.pattern for row in fold((key, 0) for key in keys)] == ["layers.{0..2}.experts.{0..3}.w"]
    keys.remove("layers.1.experts.2.w")
    patterns = [row.pattern for row in fold((key, 0) for key in keys)]
    assert patterns == ["layers.{0,2}.experts.{0..3}.w", "layers.1.experts.{0,1,3}.w"]


def test_a_layer_of_another_shape_has_a_row_of_its_own() -> None:
    rows = fold((f"l.{layer}", (8, 4) if layer == 2 else (4, 4)) for layer in range(5))
    assert [(row.pattern, row.label) for row in rows] == [("l.{0,1,3,4}", (4, 4)), ("l.2", (8, 4))]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_hold_the_numbers(numbers: set[int]) -> None:
    assert {int(key) for key in spelled_keys(f"{{{index_ranges(numbers)}}}")} == numbers
