"""The rules of the tree, read from the sources with `ast`: who may import what, and how large things may get."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared", "kernels", "gateway", "scheduler_svc", "gpu_worker", "autoscaler", "quire")
MAY_IMPORT = {
    "shared": {"shared"},
    "kernels": {"kernels"},
    "gateway": {"gateway", "shared"},
    "scheduler_svc": {"scheduler_svc", "shared"},
    "gpu_worker": {"gpu_worker", "kernels", "shared"},
    "autoscaler": {"autoscaler", "shared"},
    "quire": set(PACKAGES) - {"autoscaler"},
}
ONLY_IN = {
    "redis": ("shared/redis_",),
    "hiredis": ("shared/redis_connection.py",),
    "aiohttp": ("gateway/", "quire/bench/", "quire/api/connection.py"),
    "torch": (
        "gpu_worker/",
        "kernels/",
        "quire/bench/random_model.py",
        "quire/bench/random_adapter.py",
        "quire/bench/gpu",
        "quire/smollm2.py",
    ),
    "docker": ("autoscaler/docker_containers.py",),
    "pickle": (),
    "transformers": ("gpu_worker/model/transformers_",),
}
PURE = ("scheduler_svc/policy/", "gpu_worker/engine/")
NOT_IN_PURE = {"asyncio", "time", "random", "redis", "hiredis", "secrets", "threading"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 6
BROAD_EXCEPT_ALLOWED = {
    "gateway/app.py",
    "gateway/middleware.py",
    "gateway/model_folder.py",
    "scheduler_svc/service.py",
    "gpu_worker/engine/engine.py",
    "gpu_worker/engine_thread.py",
}
LOG_LEVELS = {"debug", "info", "warning", "recurring", "error"}
LOG_EVENT = re.compile(r"[a-z]+\.[a-z]+")
BANNED_NAMES = {"utils", "common", "helpers", "manager", "base", "misc"}


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.fixture(params=_sources(), ids=_name)
def source(request: pytest.FixtureRequest) -> tuple[str, ast.Module, str]:
    text = request.param.read_text()
    return _name(request.param), ast.parse(text), text


def test_imports_follow_the_directions(source: tuple[str, ast.Module, str]) -> None:
    """A package should import only what lies below it, and heavy modules only where they belong."""
    name, tree, _ = source
    package = name.split("/", 1)[0]
    for module, line in _imports(tree):
        top = module.split(".", 1)[0]
        if top in PACKAGES:
            assert top in MAY_IMPORT[package], f"{name}:{line} imports {module}"
        if top in ONLY_IN:
            assert name.startswith(ONLY_IN[top] or ("-",)), f"{name}:{line} imports {module}"
        if name.startswith(PURE):
            assert top not in NOT_IN_PURE | {"torch"}, f"{name}:{line} imports {module} in pure code"


def test_environment_is_read_in_one_place(source: tuple[str, ast.Module, str]) -> None:
    """Only shared/config.py should read environment variables."""
    name, _, text = source
    if name != "shared/config.py":
        assert "os.environ" not in text, name
        assert "getenv" not in text, name


def test_files_and_functions_stay_small(source: tuple[str, ast.Module, str]) -> None:
    """Files, functions and parameter lists should stay within their limits."""
    name, tree, text = source
    assert text.count("\n") <= MAX_FILE_LINES, f"{name} is too long"
    for function in _functions(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{name}: {function.name} has {length} lines"
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        if not name.startswith("kernels/") and function.name not in ("setting", "__init__"):
            assert count <= MAX_PARAMETERS, f"{name}: {function.name} has {count} parameters"


def test_names_say_what_a_file_holds(source: tuple[str, ast.Module, str]) -> None:
    """No file should be a drawer for everything, and each should say in a docstring what it owns."""
    name, tree, _ = source
    assert not BANNED_NAMES & set(Path(name).with_suffix("").parts), name
    assert ast.get_docstring(tree), f"{name} has no docstring"


def test_packages_hold_only_a_docstring(source: tuple[str, ast.Module, str]) -> None:
    """Every __init__.py but quire's (and the version that transformers probes for) should be a docstring only."""
    name, tree, _ = source
    if name.endswith("__init__.py") and name != "quire/__init__.py":
        rest = [node for node in tree.body[1:] if not (name == "kernels/__init__.py" and isinstance(node, ast.Assign))]
        assert not rest, f"{name} holds code"


def test_broad_excepts_stay_in_the_loops(source: tuple[str, ast.Module, str]) -> None:
    """`except Exception` should occur in the service loops, the engine loop, the HTTP middleware, and around the
    tokenizers library (which raises nothing finer) only."""
    name, tree, _ = source
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type
            is_broad = caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))
            assert not is_broad or name in BROAD_EXCEPT_ALLOWED, f"{name}:{node.lineno} catches everything"


def test_log_events_have_one_form(source: tuple[str, ast.Module, str]) -> None:
    """Every log event should be a literal `noun.participle`, so that all services' lines are searched in one way."""
    name, tree, _ = source
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "_log"), attr=level), args=[event, *_]) if (
                level in LOG_LEVELS
            ):
                text = str(event.value) if isinstance(event, ast.Constant) else ""
                assert LOG_EVENT.fullmatch(text), f"{name}:{node.lineno} logs {ast.unparse(event)}"
