"""The house: no circles, no large rooms, and a map in CONTRIBUTING.md that is true."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median
from types import CodeType

import pytest

from tests.models.support import save_tiny_llama
from tidekv_llm import Document, PrefillConfig, TideKV

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# top-level package -> the folder it lies in
HOMES = {
    "tidekv_llm": ROOT,
    "tidekv_apps": ROOT / "apps",
    "langchain_tidekv": ROOT / "integrations",
    "llama_index": ROOT / "integrations",
    "tidekv_fields": ROOT / "integrations",
}
MOST_FLOORS = 9


def module_files() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for package, home in HOMES.items():
        for path in (home / package).rglob("*.py"):
            parts = path.relative_to(home).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = module_files()


def imported(tree: ast.AST) -> Iterator[str]:
    """Our modules that a module imports, inside functions too; what is imported for types alone does not run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield from [one for one in (inner, str(node.module)) if one in MODULES][:1]
        yield from imported(node)


GRAPH = {name: set(imported(ast.parse(path.read_text("utf-8")))) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    """Where a module stands on the map: a package's folder, or a file beside them."""
    path = MODULES[module].relative_to(ROOT)
    if path.parts[0] != "tidekv_llm":
        depth = 4 if "llama_index" in path.parts else 2
        return "/".join(path.parts[:depth]) + "/"
    return str(path) if len(path.parts) == 2 else f"tidekv_llm/{path.parts[1]}/"


def room_graph() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {room(module): set() for module in MODULES}
    for module, others in GRAPH.items():
        rooms[room(module)] |= {room(other) for other in others} - {room(module)}
    return rooms


def test_no_import_goes_round_in_a_circle():
    assert len(list(TopologicalSorter(GRAPH).static_order())) == len(MODULES)  # a circle raises CycleError and is shown


def test_the_core_has_few_floors_and_no_room_is_in_a_circle():
    floors: dict[str, int] = {}
    rooms = room_graph()
    for name in TopologicalSorter(rooms).static_order():
        floors[name] = 1 + max((floors[other] for other in rooms[name]), default=0)
    assert max(floor for name, floor in floors.items() if name.startswith("tidekv_llm/")) <= MOST_FLOORS


def test_no_import_is_excused():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    assert [contract["name"] for contract in contracts if contract.get("ignore_imports")] == []


# --- sizes ---


def definitions(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST, int]]:
    """Every definition of a kind with its place and its lines."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, kind):
                yield f"{name}.{node.name}", node, node.end_lineno - node.lineno + 1


def test_no_file_is_above_450_lines():
    assert {name: lines for name, path in MODULES.items() if (lines := path.read_text("utf-8").count("\n")) > 450} == {}


def test_no_class_is_above_300_lines():
    assert {name: lines for name, _, lines in definitions(ast.ClassDef) if lines > 300} == {}


def test_the_median_function_has_7_lines_at_most():
    assert median(lines for *_, lines in definitions((ast.FunctionDef, ast.AsyncFunctionDef))) <= 7


# --- the map ---


def rooms_on_the_map() -> list[tuple[str, str]]:
    section = GUIDE.split("## The map")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| (.*) \|$", section, flags=re.M)


def test_the_map_names_every_room_once_in_one_sentence():
    rooms = rooms_on_the_map()
    assert sorted(name for name, _ in rooms) == sorted(set(room_graph()) - {"tidekv_llm/__init__.py"})
    for name, sentence in rooms:
        assert re.fullmatch(r"[`A-Z][^|]*\.", sentence), name
        assert ". " not in sentence, name


def test_the_map_shows_what_stands_on_what():
    place = {name: at for at, (name, _) in enumerate(rooms_on_the_map())}
    upward = [
        (name, other)
        for name, others in room_graph().items()
        for other in others
        if name in place and place.get(other, place[name] + 1) < place[name]
    ]
    assert upward == []


# --- from call to answer ---


def stops(value: str) -> list[tuple[str, str]]:
    """(file, function) of each stop that the guide lists for a value."""
    section = GUIDE.split("## From call to answer")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`, `([^`]+)`: ", section.split(f"`{value}`:\n")[1].split("`:\n")[0], flags=re.M)


@pytest.fixture(scope="module")
def functions_of_an_answer(tmp_path_factory) -> list[tuple[str, str]]:
    """Our functions in the order in which a question enters them."""
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    document = Document.from_pages(["w2 w3 w4. w5 w6 w7.", "w8 w9 w10."], "a.txt")
    entered: list[CodeType] = []

    def note(frame, event, argument) -> None:
        if event == "call":
            entered.append(frame.f_code)

    config = PrefillConfig(kept_tokens=32, chunk_size=16)
    with TideKV.from_pretrained(folder, prefill=config, dtype="float32", device="cpu") as llm:
        sys.setprofile(note)
        try:
            llm.ask(document, "w5 w6?", max_new_tokens=3)
        finally:
            sys.setprofile(None)
    places = ((Path(code.co_filename), code.co_qualname) for code in entered)
    return [(path.relative_to(ROOT).as_posix(), name) for path, name in places if path.is_relative_to(ROOT)]


@pytest.mark.parametrize("value", ["question", "token_ids"])
def test_the_guide_takes_the_way_that_a_value_takes(functions_of_an_answer, value):
    listed = stops(value)
    assert 5 <= len(listed) < 10
    on_the_way = iter(functions_of_an_answer)
    missed = [stop for stop in listed if stop not in on_the_way]  # a search goes on where the one before it ended
    assert missed == []
