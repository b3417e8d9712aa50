"""The command line: ``cxlfs VERB``. The group and the one mapping of errors to exit codes are in
``program``; a verb is a file of its name; only ``output`` prints.

Never here: code. ``import cxlfs.cli.list`` puts the name ``list`` into this module.
"""

from cxlfs.cli.program import VERBS, command, main, run

__all__ = ["VERBS", "command", "main", "run"]
