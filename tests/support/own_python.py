"""Imported first by the programs of scripts/: they run with the Python of .venv, which has
what they need, whatever PATH leads to.

Invariants
- A Python that was chosen on purpose stays: that of a virtual environment, and any where there is
  no .venv.
- The program begins anew at most once, with its arguments, before it has done anything.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python"
_chosen = sys.prefix != sys.base_prefix or not os.access(PYTHON, os.X_OK)

if not _chosen and Path(sys.argv[0]).is_file():
    sys.stdout.flush()
    os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606  no shell is wanted
