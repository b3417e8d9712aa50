"""``cxlfs completion``: what a shell needs to complete verbs, options and paths.

Never here: completing (click does, when ``program`` sees COMPLETE_VARIABLE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Final

import click
from click.shell_completion import get_completion_class

from cxlfs.cli.common import CONTEXT_SETTINGS, common_options
from cxlfs.cli.exit_codes import epilog
from cxlfs.cli.output import Output, Report, Style

COMPLETE_VARIABLE: Final = "_CXLFS_COMPLETE"

HELP = """Print a script that lets SHELL complete verbs, options and paths of cxlfs.

\b
To use it in every session, put this line into ~/.bashrc or ~/.zshrc:
  eval "$(cxlfs completion bash)"
  eval "$(cxlfs completion zsh)"
or for fish:
  cxlfs completion fish > ~/.config/fish/completions/cxlfs.fish
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Script(Report):
    """The script."""

    schema: ClassVar[str] = "cxlfs.completion/1"

    shell: str
    script: str

    def lines(self, _style: Style, /) -> Iterator[str]:
        yield from self.script.strip().splitlines()


@click.command("completion", help=HELP, context_settings=CONTEXT_SETTINGS, epilog=epilog())
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common_options
def command(shell: str, *, as_json: bool) -> None:
    """See HELP."""
    Output(as_json=as_json).report(Script(shell, script_of(shell)))


def script_of(shell: str) -> str:
    """The script, without asking the shell for its version."""
    found = get_completion_class(shell)
    if found is None:
        raise AssertionError("click knows the shells of the argument")
    completion = found(click.Command("cxlfs"), {}, "cxlfs", COMPLETE_VARIABLE)
    return str(completion.source_template % completion.source_vars())
