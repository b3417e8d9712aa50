"""Runs a module of CPython's tests, and writes a line for each test: its name, and its outcome.

``python -m test`` handles SIGSEGV, and so do programs that it runs: all writes were the kernel's.
"""

from __future__ import annotations

import sys
import unittest
from pathlib import Path


class Result(unittest.TextTestResult):
    """Says how each test ended."""

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802  unittest's name
        kinds = {"failed": self.failures, "error": self.errors, "skipped": self.skipped}
        said = [kind for kind, all_of_it in kinds.items() if test in dict(all_of_it)]
        with Path(sys.argv[2]).open("a") as report:
            report.write(f"{test.id()} {min(said, default='passed')}\n")
        super().stopTest(test)


if __name__ == "__main__":
    suite = unittest.defaultTestLoader.loadTestsFromName(f"test.{sys.argv[1]}")
    unittest.TextTestRunner(resultclass=Result, verbosity=2).run(suite)
