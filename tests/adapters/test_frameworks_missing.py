"""Adapters without frameworks: importing one asks for nothing, using one says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cxlfs import adapters
from cxlfs.errors import FrameworkMissingError

MODULES = sorted(
    path.stem for path in Path(adapters.__file__ or "").parent.iterdir() if path.stem[0] != "_"
)
FRAMEWORKS = ("torch", "lightning", "transformers", "accelerate", "nvidia_resiliency_ext", "jax")

WITHOUT = f"""
import importlib, sys
for name in {FRAMEWORKS}:
    assert name not in sys.modules, name
    sys.modules[name] = None  # as if it were not installed: importing it fails
for name in {MODULES}:
    importlib.import_module("cxlfs.adapters." + name)
"""

USES = {
    "dcp": "dcp.save(None, 1, {})",
    "lightning": "lightning.CheckpointIO",
    "nvrx": "nvrx.CheckpointManager",
    "nvrx_replicas": "nvrx_replicas.ReplicationStrategy",
    "torch": "torch.save({}, 'nowhere')",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_adapters_imports_no_framework() -> None:
    modules = [f"cxlfs.adapters.{name}" for name in MODULES]
    code = f"import sys, {', '.join(modules)}; print([n for n in {FRAMEWORKS} if n in sys.modules])"
    done = run(code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", MODULES)
def test_what_is_missing_is_said_with_its_extra(name: str) -> None:
    code = f"""{WITHOUT}
from cxlfs.adapters import {name}
from cxlfs.errors import FrameworkMissingError
try:
    {USES[name]}
except FrameworkMissingError as error:
    print(error.message, error.next_step)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "which is not installed" in done.stdout
    assert "pip install 'cxlfs[" in done.stdout


def test_extras_are_those_of_the_package() -> None:
    import tomllib

    root = Path(adapters.__file__ or "").parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    sources = "".join(path.read_text() for path in (root / "cxlfs" / "adapters").rglob("*.py"))
    named = {text.split('"')[3] for text in sources.split("require(")[1:] if text[0] == '"'}
    assert named
    assert named <= set(project["optional-dependencies"])


def test_a_framework_that_is_broken_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_framework.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        adapters.require("broken_framework", "torch")
    with pytest.raises(FrameworkMissingError, match="a_framework_that_is_not_there"):
        adapters.require("a_framework_that_is_not_there.part", "torch")
