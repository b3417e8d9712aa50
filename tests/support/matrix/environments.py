"""Virtual environments for the frameworks, outside the repository: what is needed, installed once.

Never here: the repository's .venv.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.support.matrix.catalogue import FRAMEWORKS, Framework

DEFAULT_DIRECTORY = Path.home() / ".cache" / "cxlfs-frameworks"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The build on PyPI brings CUDA along. CXLFS_TORCH_INDEX names another one, or none."""
_STAMP = "cxlfs-requirements.txt"


class NotInstalledError(Exception):
    """The message says which and why: the table has it in place of numbers."""


def python_of(framework: Framework, directory: Path, say: Callable[[str], None]) -> Path:
    """The Python that has the framework; made when it is not there. Raises NotInstalledError."""
    if not framework.environment:
        return Path(sys.executable)
    alike = [each for each in FRAMEWORKS.values() if each.environment == framework.environment]
    wanted = sorted({name for each in alike for name in each.requires})
    place = directory / framework.environment
    python = place / "bin" / "python"
    stamp = place / _STAMP
    if stamp.exists() and stamp.read_text().split() == wanted:
        return python
    say(f"installing into {place}: {', '.join(wanted)}")
    directory.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(place)])
    index = os.environ.get("CXLFS_TORCH_INDEX", TORCH_CPU_INDEX)
    extra = ["--extra-index-url", index] if index and framework.environment == "torch" else []
    options = ["-qq", "--retries", "1", "--timeout", "60", *extra]
    _run([str(python), "-m", "pip", "install", *options, *wanted])
    stamp.write_text("\n".join(wanted) + "\n")
    return python


def _run(words: Iterable[str]) -> None:
    done = subprocess.run([*words], check=False, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError((lines or ["it cannot be installed"])[0])
