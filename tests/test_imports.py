"""Imports point one way, and the rooms that run on a bare GPU machine need nothing of the gateway's."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("gateway", "engine", "radix_cache", "kernels", "tenants")
ALLOWED = {
    "gateway": {"gateway", "tenants", "engine.client", "engine.protocol", "engine.null"},
    "gateway/cli": set(ROOMS),
    "engine": {"engine", "radix_cache", "kernels"},
    "radix_cache": {"radix_cache"},
    "kernels": {"kernels"},
    "tenants": {"tenants"},
}
FORBIDDEN = {
    "gateway": {"torch", "transformers", "triton"},
    "engine": {"starlette", "uvicorn", "redis", "orjson", "msgspec", "click"},
    "radix_cache": {"torch", "transformers", "triton", "starlette", "redis", "orjson", "msgspec"},
    "kernels": {"transformers", "starlette", "redis", "orjson", "msgspec"},
    "tenants": {"torch", "transformers", "numpy", "starlette", "uvicorn"},
}


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Every absolute module name that a file imports, at any depth of its code, `from a import b` as both a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "gateway/cli" if parts[:2] == ("gateway", "cli") else parts[0]


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    for module in imported_modules(path):
        if module.split(".")[0] in ROOMS:
            assert within(module, ALLOWED[room]), f"{room} may not import {module}"
        assert not within(module, FORBIDDEN.get(room, set())), f"{room} may not import {module}"


@pytest.mark.parametrize("module", ["gateway.cli.main", "gateway.app", "gateway.supervisor", "engine.client"])
def test_light_modules_never_load_torch(module: str) -> None:
    script = f"import {module}, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_our_kernels_package_does_not_look_like_hugging_faces() -> None:
    """transformers takes a `kernels` package with a version for its own kernel hub."""
    import kernels

    assert not hasattr(kernels, "__version__")
