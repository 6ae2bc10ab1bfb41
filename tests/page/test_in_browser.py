"""The pages of `shardproof page` in Chromium: no error, no request; search, sort, map, keyboard, themes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardproof.commands.cli.group import run
from tests.unit.commands.cli.samples import Sample, cut, model, rows_cut, write

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: `make test-page` installs it"
)
pytestmark = [pytest.mark.browser, pytest.mark.processes]

NAMES = ("chromium", "chromium-browser", "google-chrome")
STATE = model(4, dim=16)
HOSTILE = (
    "</script><script>document.title = 'x'</script>",
    '"><img src=x onerror="document.title = 1">',
    "a\u202eb",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the system, or the one that playwright has downloaded."""
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        if not os.path.exists(found):
            pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path, and playwright has none")
        chromium = playwright.chromium.launch(executable_path=found)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a page and opens it. At the end, no page has had an error or made a request."""
    opened: list[tuple[Any, str, list[str]]] = []

    def shown(*arguments: object, **options: Any) -> Any:
        path = tmp_path / f"page-{len(opened)}.html"
        assert run(["page", *map(str, arguments), "-o", str(path)]) == 0
        tab, seen = browser.new_page(**options), list[str]()
        tab.on("console", lambda message: seen.append(message.text))
        tab.on("pageerror", lambda error: seen.append(str(error)))
        tab.on("request", lambda request: seen.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]", state="attached")
        opened.append((tab, path.as_uri(), seen))
        return tab

    shown.opened = opened  # type: ignore[attr-defined]
    yield shown
    for tab, url, seen in opened:
        assert (seen, tab.title().startswith("shardproof: ")) == ([url], True)
        tab.close()


def sample(step: int, **changed: Any) -> Sample:
    cuts = {key: rows_cut(array.shape, 2) for key, array in STATE.items()}
    about = {
        "tensors": STATE,
        "cuts": cuts,
        "world_size": 2,
        "step": step,
        "time": time.time() - 600 * (6 - step),
    }
    return Sample(**about | changed)


def section(title: str) -> str:
    return f"section:has(h2:text-is('{title}'))"


def label_of_focus(tab: Any) -> str:
    focus = "document.activeElement"
    found: str = tab.evaluate(f"{focus}.getAttribute('aria-label') || {focus}.textContent")
    return found


def test_a_run(show: Any, tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    for step in range(1, 6):
        write(run_folder / f"step-{step:08d}", sample(step), commit=step < 5)
    cut(run_folder / "step-00000004")
    write(run_folder / "suspect-00000002", sample(2))
    (run_folder / "step-00000001" / "pinned.json").write_text(json.dumps({"label": HOSTILE[0], "time": 1.0}))
    tab = show(run_folder, "--mtbf", "12h")
    assert tab.inner_text(".lead").startswith("restore takes step-00000003")
    assert tab.locator("li:has-text('passed over')").count() == 2
    assert tab.locator("pre", has_text="shardproof prune").count() == 1
    steps = tab.locator("svg .step")
    assert steps.count() == 6
    assert [tab.locator(f".step .{mark}").count() for mark in ("pin", "suspect", "takes")] == [1, 1, 1]
    steps.nth(0).hover()
    assert HOSTILE[0] in tab.inner_text("#tip")
    steps.nth(0).focus()
    tab.keyboard.press("ArrowRight")
    assert label_of_focus(tab).startswith(("step-00000002", "suspect-00000002"))
    assert tab.locator("table.rows tbody tr").count() == 6
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 560, "height": 794})  # A5
    widths = "[...document.querySelectorAll('.scroll, html')].map(one => one.scrollWidth - one.clientWidth)"
    assert max(tab.evaluate(widths)) <= 0, "no column is cut off on paper"


def test_the_time_line_names_each_minute_once(show: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / "run" / f"step-{step:08d}", sample(step, time=1_700_000_000.0 + step))
    texts = (
        show(tmp_path / "run").locator("svg[aria-label='time line of the steps'] text").all_text_contents()
    )
    labels = [text for text in texts if text.startswith("step ") or text.endswith(" UTC")]
    assert labels == ["step 1", "2023-11-14 22:13 UTC", "step 2", "step 3"]


def test_a_checkpoint(show: Any, tmp_path: Path) -> None:
    boxes = [(rank, ((8 * (rank // 2), 8 * (rank % 2)), (8, 8))) for rank in range(4)]
    cuts = {**sample(1).cuts, "model.layers.1.wq": boxes}
    write(tmp_path / "step", sample(1, cuts=cuts, world_size=4))
    tab = show(tmp_path / "step", "--verify")
    rows = tab.locator(f"{section('Tensors')} tbody tr")
    assert rows.count() == len(STATE)
    tab.keyboard.press("/")
    tab.keyboard.type("layers.1. WQ")
    assert rows.count() == 2, "one of the model, one of the optimizer"
    assert rows.nth(0).inner_text().split()[-1] == "verified"
    rows.nth(0).focus()
    tab.keyboard.press("Enter")
    assert tab.inner_text("h3") == "model.layers.1.wq"
    drawn = tab.locator("svg .box")
    assert drawn.count() == 4 and rows.nth(0).get_attribute("aria-selected") == "true"
    places = {(box["x"], box["y"]) for box in (drawn.nth(at).bounding_box() for at in range(4))}
    assert len({x for x, _ in places}) == len({y for _, y in places}) == 2, "two dimensions are cut"
    assert len({drawn.nth(at).evaluate("box => box.style.fill") for at in range(4)}) == 4
    rows.nth(0).focus()
    tab.keyboard.press("ArrowDown")
    assert "optimizer.layers.1.wq" in label_of_focus(tab)


def test_a_table_is_sorted_from_the_keyboard(show: Any, tmp_path: Path) -> None:
    write(tmp_path / "step", Sample({f"w{at}": np.ones(at, np.float32) for at in (2, 10, 1, 5, 3, 4)}))
    tab = show(tmp_path / "step")
    table = tab.locator(f"{section('Tensors')} table")
    keys = table.locator("tbody tr td:first-child")
    for column, orders in (("bytes", ("descending", "ascending")), ("key", ("ascending", "descending"))):
        button = table.get_by_role("button", name=column, exact=True)
        for order in orders:
            button.focus()
            tab.keyboard.press("Enter")
            head = table.locator("th", has=tab.get_by_role("button", name=column, exact=True))
            assert head.get_attribute("aria-sort") == order
            ordered = ["w1", "w2", "w3", "w4", "w5", "w10"]
            assert keys.all_inner_texts() == (ordered if order == "ascending" else ordered[::-1])
    assert table.locator("th[aria-sort=none]").count() == 6


def test_the_map_opens_parts(show: Any, tmp_path: Path) -> None:
    write(tmp_path / "step", sample(1))
    tab = show(tmp_path / "step")
    label = "optimizer: "
    tab.locator(f"svg [aria-label^='{label}']").focus()
    tab.keyboard.press("Enter")
    assert tab.locator("nav.trail button").count() == 2
    assert label_of_focus(tab).startswith("optimizer.layers: ")
    tab.locator("svg [aria-label^='optimizer.embed']").click()
    assert tab.inner_text("h3") == "optimizer.embed.weight.exp_avg"
    tab.locator("svg [aria-label^='optimizer.layers: ']").focus()
    tab.keyboard.press("Backspace")
    assert tab.locator("nav.trail button").count() == 1


def test_two_checkpoints(show: Any, tmp_path: Path) -> None:
    changed = {key: array * (1 + 0.1 * ("layers.2" in key)) for key, array in STATE.items()}
    changed["model.layers.0.wo"] = STATE["model.layers.0.wo"].copy()
    changed["model.layers.0.wo"][0, 0] = np.nan
    write(tmp_path / "a", sample(1))
    changed = {key: array.astype(np.float32) for key, array in changed.items()}
    write(tmp_path / "b", sample(2, tensors=changed))
    tab = show(tmp_path / "a", tmp_path / "b")
    keys = tab.locator(f"{section('Tensors that differ')} tbody td:first-child").all_inner_texts()
    assert keys[0] == "model.layers.0.wo" and len(keys) == 5
    assert all("layers.2." in key for key in keys[1:])
    assert tab.locator("figure").count() == 5 and tab.locator("figure svg .curve").count() == 15
    assert "NaN in A and B [0, 1]" in tab.inner_text("figure >> nth=0")


def test_ten_thousand_tensors_make_few_elements(show: Any, tmp_path: Path) -> None:
    """What the browser lays out does not grow with the tensors. The time is printed, and not bounded."""
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(1000) for name in "abcdefghij"]
    write(tmp_path / "step", Sample({name: np.ones(4, np.float32) for name in names}))
    tab = show(tmp_path / "step")
    print(f"ready after {tab.get_attribute('html', 'data-ready')} ms")
    assert tab.evaluate("document.querySelectorAll('*').length") < 4000
    tab.keyboard.press("/")
    tab.keyboard.type("layers.999.")
    assert tab.locator(f"{section('Tensors')} tbody tr").count() == 10
    assert "10 found, 10,000 in all" in tab.inner_text(section("Tensors"))
    tab.keyboard.press("Control+A")
    tab.keyboard.press("Delete")
    tab.locator(f"{section('Tensors')} button:text-is('next')").click()
    assert "51 to 100 of 10,000" in tab.inner_text(section("Tensors"))


def test_hostile_text_is_shown_and_does_nothing(show: Any, tmp_path: Path) -> None:
    tensors = {key: np.ones(4, np.float32) for key in HOSTILE}
    write(
        tmp_path / "step",
        Sample(tensors, metadata=dict.fromkeys(HOSTILE, HOSTILE[0]), objects={"o": HOSTILE[1]}),
    )
    tab = show(tmp_path / "step")
    assert tab.locator("img").count() == 0 and tab.locator("script").count() == 2
    text = tab.inner_text("body")
    assert HOSTILE[0] in text and HOSTILE[1] in text
    assert "a\\u202eb" in text and "\u202e" not in text


def test_the_policy_stops_scripts_and_requests_even_in_the_markup(show: Any, tmp_path: Path) -> None:
    write(tmp_path / "step", Sample({"w": np.ones(4, np.float32)}))
    tab = show(tmp_path / "step")
    ((_, _, seen),) = show.opened
    with tab.expect_console_message(lambda message: "img-src data:" in message.text):
        markup = "<img src='data:,' onerror='document.title = 1'><img src='http://127.0.0.1:1/x'>"
        tab.evaluate(f'document.body.insertAdjacentHTML("beforeend", "{markup}")')
    assert tab.title().startswith("shardproof: ")
    assert any("inline event handler" in text for text in seen), "the browser says what the policy stopped"
    show.opened.clear()


def test_both_themes_and_the_printed_page(show: Any, tmp_path: Path) -> None:
    write(tmp_path / "step", sample(1))
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (
        show(tmp_path / "step", color_scheme=scheme).evaluate(colour) for scheme in ("light", "dark")
    )
    assert light != dark
    tab = show(tmp_path / "step", color_scheme="light")
    found = []
    for name in ("light", "dark", "auto"):
        tab.click("#theme")
        assert tab.inner_text("#theme") == f"theme: {name}"
        found.append(tab.evaluate(colour))
    assert found == [light, dark, light]
    tab.click("#theme")
    tab.click("#theme")
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert not tab.is_visible("#theme")
    assert tab.is_visible("table.rows")
