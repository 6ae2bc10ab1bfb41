"""docs/process_state.md lists all module-level mutable state of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "shardproof"

# Calls that make a mutable object, whatever their arguments.
MUTABLE = {
    *("Condition", "ContextVar", "Counter", "Event", "Lock", "Queue", "RLock", "Semaphore", "SimpleQueue"),
    *("WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "bytearray", "count", "cycle"),
    *("defaultdict", "deque", "local", "lock"),
}
# Containers that may be constant tables: state only if they begin empty or the module changes them.
CONTAINERS = {"OrderedDict", "dict", "list", "set"}
CHANGES = {
    *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert"),
    *("intersection_update", "pop", "popitem", "remove", "setdefault", "symmetric_difference_update"),
    *("update",),
}
CACHES = {"cache", "lru_cache"}
FROZEN = {"NamedTuple", "Enum", "IntEnum", "StrEnum", "Protocol"}


@dataclass(frozen=True)
class SharedName:
    """One name of a module, or one of a class body, that the process shares."""

    name: str
    is_cache: bool = False


def last_name(node: ast.expr) -> str:
    """The last part of a dotted or subscripted name: ``WeakSet`` of ``weakref.WeakSet[int]``."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_frozen(cls: ast.ClassDef) -> bool:
    """True if instances never change: declared frozen, or no method sets an attribute."""
    for call in (*cls.decorator_list, cls):
        for word in call.keywords if isinstance(call, ast.Call | ast.ClassDef) else ():
            if word.arg == "frozen" and isinstance(word.value, ast.Constant) and word.value.value:
                return True
    if FROZEN & set(map(last_name, cls.bases)):
        return True
    stored = (
        node
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    )
    return not any(isinstance(node.value, ast.Name) and node.value.id == "self" for node in stored)


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Each name that a body binds to a value."""
    for node in body:
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from assignments(node.body)
            yield from assignments(getattr(node, "orelse", []))
            yield from assignments(getattr(node, "finalbody", []))
            for handler in getattr(node, "handlers", []):
                yield from assignments(handler.body)
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                yield target.id, value


def changed_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names whose value the module's functions replace (``global``), or that it changes in place."""
    changed = set[str]()
    for node in nodes:
        if isinstance(node, ast.Global):
            changed |= set(node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES:
                changed.add(last_name(node.func.value))
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed.add(last_name(node.value))
        elif isinstance(node, ast.AugAssign):
            changed.add(last_name(node.target))
    return changed


def is_state(value: ast.expr, changed: bool, mutable_classes: set[str]) -> bool:
    """True if a name that is bound to this value is state: the value or its content can change."""
    if isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp):
        return changed or (isinstance(value, ast.List) and not value.elts)
    if isinstance(value, ast.Dict | ast.DictComp):
        return changed or (isinstance(value, ast.Dict) and not value.keys)
    if isinstance(value, ast.Call):
        kind = last_name(value.func)
        if kind in CONTAINERS:
            return changed or not (value.args or value.keywords)
        return kind in MUTABLE | mutable_classes
    return False


@dataclass(frozen=True)
class Scanned:
    """What the check needs of the source of a module."""

    classes: dict[str, bool]
    """Each class, and whether it is frozen."""
    certain: set[SharedName]
    """Shared names that are state, whatever their value."""
    bound: list[tuple[str, ast.expr, bool]]
    """Other shared names, with their value, and whether the module changes it."""

    @classmethod
    def of(cls, source: str) -> Scanned:
        tree = ast.parse(source)
        nodes = [*ast.walk(tree)]
        changed = changed_names(nodes)
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        bodies = [("", tree.body)] + [
            (f"{one.name}.", one.body)
            for one in classes
            if not {"dataclass", "Struct"} & {*map(last_name, one.decorator_list + one.bases)}
        ]
        replaced = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        caches = {
            SharedName(node.name, is_cache=True)
            for node in nodes
            if isinstance(node, ast.FunctionDef) and CACHES & set(map(last_name, node.decorator_list))
        }
        return cls(
            {one.name: is_frozen(one) for one in classes},
            {SharedName(name) for name in replaced} | caches,
            [
                (prefix + name, value, name in changed)
                for prefix, body in bodies
                for name, value in assignments(body)
                if prefix + name != "__all__"
            ],
        )

    @property
    def mutable_classes(self) -> set[str]:
        """Names of classes whose instances change."""
        return {name for name, frozen in self.classes.items() if not frozen}

    def state(self, mutable_classes: Collection[str] = ()) -> set[SharedName]:
        """The mutable state of the module.

        Args:
            mutable_classes: names of classes of other modules whose instances change.
        """
        mutable = {*mutable_classes} - self.classes.keys() | self.mutable_classes
        return self.certain | {
            SharedName(name) for name, value, changed in self.bound if is_state(value, changed, mutable)
        }


def listed() -> dict[str, bool]:
    """What docs/process_state.md lists, as ``file: name``; True for the table of caches."""
    state, caches = (ROOT / "docs" / "process_state.md").read_text().split("| cache |")
    rows = re.compile(r"^\| `([^`]+\.py)`: `([^`]+)` \|", re.MULTILINE)
    return {
        f"{file}: {name}": is_cache
        for is_cache, text in ((False, state), (True, caches))
        for file, name in rows.findall(text)
    }


def test_module_level_state_is_what_the_page_lists() -> None:
    modules = {path: Scanned.of(path.read_text()) for path in SOURCE.rglob("*.py")}
    mutable = {name for module in modules.values() for name in module.mutable_classes}
    found = {
        f"{path.relative_to(SOURCE)}: {one.name}": one.is_cache
        for path, module in modules.items()
        for one in module.state(mutable)
    }
    assert found == listed()


# The check itself.


@pytest.mark.parametrize(
    "source",
    [
        "x = {}",
        "x: dict[str, int] = {}",
        "x = []",
        "x = set[int]()",
        "x = list()",
        "x = weakref.WeakSet()",
        "x: WeakSet[int] = WeakSet()",
        "x = threading.Lock()",
        "x = forks.lock()",
        "x = itertools.count()",
        "x = None\ndef f():\n    global x\n    x = 1",
        "x = {1: 2}\ndef f():\n    x[3] = 4",
        "x = {1: 2}\ndef f():\n    del x[1]",
        "x = {1: 2}\ndef f():\n    x.update(y)",
        "x = [1]\ndef f():\n    x.append(2)",
        "class A:\n    def f(self):\n        self.y = 1\nx = A()",
        "if True:\n    x = {}",
        "try:\n    pass\nexcept OSError:\n    x = {}",
        "x = Elsewhere()",
    ],
)
def test_state_is_found(source: str) -> None:
    assert Scanned.of(source).state({"Elsewhere"}) == {SharedName("x")}


def test_state_of_a_class_and_caches_are_found() -> None:
    assert Scanned.of("class A:\n    known = {}").state() == {SharedName("A.known")}
    for decorator in ("functools.lru_cache(maxsize=8)", "cache"):
        assert Scanned.of(f"@{decorator}\ndef f(): pass").state() == {SharedName("f", is_cache=True)}


@pytest.mark.parametrize(
    "source",
    [
        "x = {1: 2}",
        "x = (1, 2)",
        "x = frozenset()",
        "x = {name: 1 for name in y}",
        "x = dict[str, int]",
        "x = logging.getLogger('a')",
        "@dataclass(frozen=True)\nclass A:\n    y: int\nx = A(1)",
        "class A:\n    def f(self):\n        return 1\nx = A()",
        "def f():\n    x = {}\n    x[1] = 2",
        "@dataclass\nclass A:\n    y: Any = make()",
    ],
)
def test_constants_pass(source: str) -> None:
    assert Scanned.of(source).state() == set()
