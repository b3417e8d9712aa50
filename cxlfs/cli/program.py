"""The program ``cxlfs``: the group of verbs, and the one mapping of errors to exit codes.

Verbs live one to a file and are imported when they are asked for, so that ``cxlfs umount`` need not
wait for numpy.

Never here: what a verb does (its file), printing (``output``).

Invariants
- An expected error is two lines: what happened, and what to do next; with --json one document.
- A traceback is shown with --debug only.
- Exit codes mean what docs/operations.md says; the tables there are made from ``errors``.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

import click

from cxlfs import __version__
from cxlfs.cli.common import CONTEXT_SETTINGS, debug_option
from cxlfs.cli.exit_codes import FAILURE, OK, SIGNAL_BASE, USAGE
from cxlfs.cli.output import ExitError, Output
from cxlfs.errors import CxlfsError

HELP = """A crash-atomic, checksummed checkpoint store on persistent memory.

\b
Make a store, mount it, let training write into it, look at it:
  cxlfs mkfs /var/lib/ckpt.cxlfs --size 4G
  cxlfs mount /var/lib/ckpt.cxlfs /mnt/ckpt
  cxlfs list /mnt/ckpt
  cxlfs umount /mnt/ckpt
"""
SHORT_HELP = {
    "mkfs": "Make an empty store on a region or in a new file.",
    "mount": "Mount a store; returns when the mount answers.",
    "umount": "Unmount a store and close it cleanly.",
    "verify": "Check structures and data; repair what can be repaired.",
    "status": "Show the state of a store and what to do about it.",
    "list": "List checkpoints with their commits and states.",
    "inspect": "List the tensors of a checkpoint, with statistics.",
    "diff": "Show what changed between two checkpoints.",
    "manifest": "Write down what a checkpoint consists of, with checksums.",
    "good": "Print the newest checkpoint that is complete and verified.",
    "history": "Show earlier versions, and what was removed.",
    "restore": "Bring back an earlier version of a file.",
    "undelete": "Bring back what was removed, a whole tree too.",
    "forget": "Drop earlier versions, for secrets.",
    "pin": "Keep what a path means readable, whatever happens.",
    "unpin": "Take a pin away.",
    "pins": "List pins.",
    "keep": "Remove old checkpoints, but for those that a rule keeps.",
    "tidy": "Set unfinished checkpoints aside, so that a framework resumes.",
    "advise": "Say how often a job should save, and what its failures cost.",
    "policy": "Say which directories are done, or undone, as a whole.",
    "send": "Write a checkpoint to a pipe, for another machine.",
    "receive": "Make a checkpoint of what another machine sends.",
    "drain": "Put a checkpoint into an object store, verified there.",
    "fetch": "Bring a checkpoint back from an object store.",
    "agent": "Keep, copy and give back a job's checkpoints, one on each node.",
    "job": "Show the history of a job's checkpoints; decide between two.",
    "run": "Start a program that stores into mounts at memory speed.",
    "service": "Let systemd mount a store at boot.",
    "completion": "Print what lets a shell complete verbs and options.",
    "dump": "Show decoded structures of the media, for support.",
}
"""Here, and not with each verb: the list is shown without importing them."""
VERBS = tuple(SHORT_HELP)
_HELPER_ARGUMENTS_MIN = 2
_COMPLETE_VARIABLE = "_CXLFS_COMPLETE"


class _Group(click.Group):
    """Finds verbs by importing ``cxlfs.cli.VERB``; lists them in the order of a store's life."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module(f"cxlfs.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  click's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(SHORT_HELP.items()))


@click.group(
    cls=_Group,
    help=HELP,
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes, error ids, JSON schemas and recipes: docs/operations.md.",
)
@click.version_option(__version__, "-V", "--version", prog_name="cxlfs")
@debug_option
def command() -> None:
    """See HELP."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The program ``cxlfs``; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if _COMPLETE_VARIABLE in os.environ:
        return _complete(os.environ[_COMPLETE_VARIABLE])
    if _called_by_mount(given):
        return int(importlib.import_module("cxlfs.cli.system").mount_main(given))
    return run(command, given)


def _complete(instruction: str) -> int:
    """Answer a shell that completes a command line; see ``completion``."""
    module = importlib.import_module("click.shell_completion")
    return int(module.shell_complete(command, {}, "cxlfs", _COMPLETE_VARIABLE, instruction))


def _called_by_mount(arguments: Sequence[str]) -> bool:
    """mount.fuse(8) turns type ``fuse.cxlfs`` into ``cxlfs SOURCE MOUNTPOINT -o OPTIONS``."""
    return (
        len(arguments) >= _HELPER_ARGUMENTS_MIN
        and arguments[0] not in VERBS
        and arguments[0].startswith("/")
        and arguments[1].startswith("/")
    )


def run(root: click.Command, arguments: Sequence[str], program: str = "cxlfs") -> int:
    """Run a command; whatever happens becomes a message and an exit code."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    output = Output(as_json="--json" in own)
    verb = next((argument for argument in own if argument in VERBS), None)
    name = program if verb is None or root is not command else f"{program} {verb}"
    guarded = _Failure(output, name, debug="--debug" in own)
    return guarded.guard(lambda: _invoke(root, program, list(arguments)))


def _invoke(root: click.Command, program: str, arguments: list[str]) -> object:
    """What ``root.main`` does, but for its own treatment of closed pipes and Ctrl-C."""
    try:
        with root.make_context(program, arguments) as context:
            return root.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code


class _Failure:
    """Turns exceptions into messages and exit codes: the only place that does."""

    def __init__(self, output: Output, command_name: str, *, debug: bool) -> None:
        self._output = output
        self._command_name = command_name
        self._debug = debug

    def guard(self, work: Callable[[], object]) -> int:
        """Do ``work``; its exit code (0 unless it gives one), or that of what it raised."""
        try:
            result = work()
            self._output.flush()
        except BrokenPipeError:
            _forget_stdout()
            return SIGNAL_BASE + signal.SIGPIPE
        except (KeyboardInterrupt, click.Abort):
            code = SIGNAL_BASE + signal.SIGINT
            return self._say("interrupted", "interrupted", code, "run the command again")
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return USAGE
        except click.UsageError as error:
            return self._say_usage(error)
        except click.ClickException as error:
            return self._say("failure", error.format_message(), FAILURE, "see --help")
        except CxlfsError as error:
            return self._say(error.id, error.message, error.exit_code, error.next_step)
        except OSError as error:
            _forget_stdout()
            return self._say("failure", _describe(error), FAILURE, "check the path and the system")
        except Exception as error:  # noqa: BLE001  the last resort: a defect still ends in a message
            message = f"unexpected {type(error).__name__}: {error}"
            return self._say("failure", message, FAILURE, CxlfsError.default_next_step)
        return result if isinstance(result, int) else OK

    def _say(self, error_id: str, message: str, code: int, next_step: str) -> int:
        if self._debug:
            traceback.print_exc(file=self._output.stderr)
        text = " ".join(message.split())
        self._output.failure(ExitError(self._command_name, error_id, code, text, next_step))
        self._output.flush()
        return code

    def _say_usage(self, error: click.UsageError) -> int:
        message = error.format_message().rstrip(".")
        program = error.ctx.command_path if error.ctx is not None else self._command_name
        text = message[:1].lower() + message[1:]
        return self._say("usage", text, USAGE, f"see {program} --help")


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {reason}" if error.filename else reason


def _forget_stdout() -> None:
    """Python flushes stdout once more at exit: what a closed pipe refused must not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except OSError:
        pass
    finally:
        os.close(nowhere)
