"""The files of this checkout, for tests that look at the project itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files() -> list[Path]:
    """Every file that is, or could be, committed; without git all that is not hidden or built."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(
            ["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"],
            capture_output=True,
            check=True,
        )
        names = [name for name in listed.stdout.decode().split("\0") if name]
        found = [ROOT / name for name in names]
    else:
        found = [path for path in ROOT.rglob("*") if _is_source(path.relative_to(ROOT))]
    return sorted(path for path in found if path.is_file())


def _is_source(path: Path) -> bool:
    built = path.suffix in (".so", ".pyc") or any(part.endswith(".egg-info") for part in path.parts)
    return not built and not path.parts[0].startswith((".", "build", "dist"))


def has_shebang(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def is_python(path: Path) -> bool:
    if path.suffix:
        return path.suffix == ".py"
    with path.open("rb") as file:
        return file.readline(100).startswith(b"#!") and b"python" in path.read_bytes()[:100]


def python_files(*below: str) -> list[Path]:
    """Modules and programs, of the whole project or below the directories named."""
    roots = [ROOT / name for name in below] or [ROOT]
    return [p for p in files() if any(r in p.parents for r in roots) and is_python(p)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))
