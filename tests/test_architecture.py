"""The house rules that a machine can check: arrows point one way, no import cycles, a pure core."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = SOURCE / "dormouse"

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "errors": {"core"},
    "tensors": set(),
    "tasks": {"core", "errors", "tensors"},
    "functions": {"core", "errors", "tasks"},
    "logs": set(),
    "metrics": {"core"},
    "watch": {"core"},
    "submit": {"core", "functions", "metrics", "tasks", "tensors", "watch"},
    "wire": {"core"},
    "slab": {"core", "errors", "tensors"},
    "config": {"core", "errors"},
    "device": {"core", "errors"},
    "calibration": {"core", "errors", "device"},
    "store": {"core", "errors", "tasks", "tensors", "wire"},
    "model": {"core", "errors", "tasks", "tensors", "functions", "store"},
    "executor": {"core", "errors", "tensors", "device", "store", "model", "wire", "slab"},
    "tenants": {"core", "errors", "functions", "metrics", "submit", "watch"},
    "gateway": {"core", "errors", "logs", "metrics", "tasks", "tensors", "functions", "submit", "tenants", "watch"},
    "billing": {"core", "errors"},
    "control": {
        "core",
        "billing",
        "errors",
        "tensors",
        "functions",
        "submit",
        "wire",
        "slab",
        "config",
        "calibration",
        "device",
        "store",
        "model",
        "executor",
        "journal",
        "watch",
        "metrics",
        "tasks",
    },
    "journal": {"core", "errors"},
    "tls": {"errors"},
    "connections": {"core", "logs"},
    "accepting": {"connections", "logs"},
    "workload": {"core"},
    "traces": {"errors", "workload"},
    "load": {"core", "errors", "tls", "traces", "workload"},
    "sim": {"core", "errors", "journal", "traces", "workload"},
    "demo": {"core", "errors", "tensors", "functions", "config"},
    "serving": {
        "core",
        "errors",
        "submit",
        "config",
        "control",
        "gateway",
        "tenants",
        "tls",
        "accepting",
        "connections",
    },
    "cli": {
        "core",
        "billing",
        "errors",
        "functions",
        "config",
        "calibration",
        "device",
        "logs",
        "serving",
        "tenants",
        "tls",
        "demo",
        "journal",
        "load",
        "sim",
        "watch",
    },
    "__init__": set(),
}
"""Room by room, the other rooms of the house that its files may import. ``functions.py`` is a room of one file."""

CORE_OUTSIDE = {
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "typing",
    "zlib",
}
TORCH_FREE = {
    "core",
    "errors",
    "tasks",
    "tensors",
    "functions",
    "watch",
    "submit",
    "wire",
    "slab",
    "config",
    "calibration",
    "device",
    "store",
    "tenants",
    "gateway",
    "logs",
    "metrics",
    "billing",
    "control",
    "tls",
    "connections",
    "serving",
    "cli",
    "journal",
    "load",
    "sim",
    "traces",
    "workload",
}


def modules() -> dict[str, Path]:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(file: Path, *, at_import_time: bool) -> set[str]:
    """Absolute names of what a file imports; relative imports are not used in this house (ruff's TID would say so)."""
    tree = ast.parse(file.read_text())
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    names = set()
    for node in ast.walk(tree):
        if at_import_time and id(node) in inside_functions:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_room_imports_only_the_rooms_below_it(module: str) -> None:
    room = room_of(module)
    for name in imports_of(modules()[module], at_import_time=False):
        if name.startswith("dormouse.") and name.split(".")[1] != "__version__":
            other = room_of(name)
            assert other == room or other in MAY_IMPORT[room], f"{module} imports {name}"


def test_no_import_cycles() -> None:
    known = modules()
    graph = {
        module: {name for name in imports_of(file, at_import_time=True) if name in known and name != module}
        for module, file in known.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in graph[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_core_imports_only_the_standard_library_and_msgspec() -> None:
    for module, file in modules().items():
        if room_of(module) == "core":
            for name in imports_of(file, at_import_time=False):
                top = name.rpartition(".")[0] if name not in CORE_OUTSIDE else name
                assert name.startswith("dormouse.core") or name in CORE_OUTSIDE or top in CORE_OUTSIDE, (
                    f"{module} imports {name}"
                )


def test_core_opens_and_prints_nothing() -> None:
    """Clock, randomness and logging are shut out by the imports; these need none."""
    for module, file in modules().items():
        if room_of(module) == "core":
            names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
            assert not names & {"open", "print", "input", "exec", "eval", "__import__"}, module


def test_only_models_executors_and_the_demo_know_torch() -> None:
    for module, file in modules().items():
        if room_of(module) in TORCH_FREE or module.endswith("supervisor"):
            names = {name.split(".")[0] for name in imports_of(file, at_import_time=False)}
            assert not names & {"torch", "transformers"}, f"{module} imports torch"


PURE_IN_GATEWAY = {"kserve", "bodies", "encoding", "grpc_form", "reports", "openapi", "openai_form"}
"""What reads and writes V2, and its rules."""


def test_the_rules_of_v2_know_no_server() -> None:
    for name in PURE_IN_GATEWAY:
        outside = {each.split(".")[0] for each in imports_of(PACKAGE / "gateway" / f"{name}.py", at_import_time=False)}
        assert not outside & {"asyncio", "starlette", "uvicorn", "grpc", "socket"}, name


def test_who_may_what_is_decided_without_clock_or_files() -> None:
    for name in ("callers", "limits", "seen"):
        outside = {each.split(".")[0] for each in imports_of(PACKAGE / "tenants" / f"{name}.py", at_import_time=False)}
        assert outside <= {"dormouse", "msgspec", "math", "collections", "typing"}, name


def test_only_the_grpc_door_knows_grpc_and_http_can_do_without_it() -> None:
    for module, file in modules().items():
        names = {name.split(".")[0] for name in imports_of(file, at_import_time=False)}
        assert module.startswith("dormouse.gateway.grpc_") or not names & {"grpc", "google"}, module
    door = imports_of(PACKAGE / "gateway" / "app.py", at_import_time=True)
    assert not any(name.startswith("dormouse.gateway.grpc_") for name in door)


def test_an_executor_starts_without_the_library_that_only_some_models_need() -> None:
    told = "import sys, dormouse.executor.process; print('transformers' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"
