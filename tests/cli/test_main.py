"""The one place that turns what happened into a message and an exit code."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from cxlfs import __version__, cli, errors
from cxlfs.cli import exit_codes, program
from cxlfs.errors import CxlfsError, InvariantError
from tests.support.cli import PROGRAM, Run, Said, assert_two_lines, run_program


def raising(error: BaseException) -> click.Command:
    """A program whose verb ``mkfs`` fails with ``error``."""

    @click.group()
    def program() -> None:
        pass

    @program.command("mkfs")
    @click.option("--json", "as_json", is_flag=True)
    @click.option("--debug", is_flag=True)
    def mkfs(**_options: bool) -> None:
        raise error

    return program


def guarded(error: BaseException, capfd: pytest.CaptureFixture[str], *flags: str) -> Said:
    code = program.run(raising(error), ["mkfs", *flags])
    captured = capfd.readouterr()
    return Said(code, captured.out, captured.err)


def make_error(error_class: type[CxlfsError]) -> CxlfsError:
    error = error_class.__new__(error_class)
    CxlfsError.__init__(error, "it did not work")
    return error


@pytest.mark.parametrize("error_class", exit_codes.error_classes(), ids=lambda c: c.id)
def test_every_error_is_two_lines_and_its_code(
    error_class: type[CxlfsError], capfd: pytest.CaptureFixture[str]
) -> None:
    said = guarded(make_error(error_class), capfd)
    assert said.code == error_class.exit_code
    assert said.stdout == ""
    assert said.stderr == (f"cxlfs: it did not work\nnext: {error_class.default_next_step}\n")


@pytest.mark.parametrize("error_class", exit_codes.error_classes(), ids=lambda c: c.id)
def test_every_error_is_one_document_with_json(
    error_class: type[CxlfsError], capfd: pytest.CaptureFixture[str]
) -> None:
    said = guarded(make_error(error_class), capfd, "--json")
    assert said.stderr == ""
    assert said.document == {
        "schema": "cxlfs.exit_error/1",
        "message_type": "exit_error",
        "command": "cxlfs",
        "id": error_class.id,
        "exit_code": error_class.exit_code,
        "message": "it did not work",
        "next_step": error_class.default_next_step,
    }


def test_a_message_of_several_lines_becomes_one(capfd: pytest.CaptureFixture[str]) -> None:
    said = guarded(errors.UsageError("one\n  two", next_step="three"), capfd)
    assert said.stderr == "cxlfs: one two\nnext: three\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InvariantError("impossible"), "unexpected InvariantError: impossible"),
        (ZeroDivisionError("x"), "unexpected ZeroDivisionError: x"),
        (OSError(28, "No space left on device", "/x"), "/x: No space left on device"),
        (OSError("plain"), "plain"),
    ],
)
def test_what_nobody_expected_is_still_two_lines(
    error: Exception, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = guarded(error, capfd)
    assert said.code == 1
    assert words in said.stderr
    assert len(said.stderr.splitlines()) == 2
    assert "Traceback" not in said.stderr


def test_debug_shows_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    said = guarded(errors.UsageError("wrong"), capfd, "--debug")
    assert said.stderr.startswith("Traceback (most recent call last)")
    assert said.stderr.endswith("cxlfs: wrong\nnext: see --help\n")
    assert said.code == 2


def test_interrupt_is_130(capfd: pytest.CaptureFixture[str]) -> None:
    said = guarded(KeyboardInterrupt(), capfd)
    assert said.code == 128 + signal.SIGINT
    assert said.stderr.startswith("cxlfs: interrupted\nnext: ")


# --- usage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "command", "words"),
    [
        (["mkfs"], "cxlfs mkfs", "missing argument 'SOURCE'"),
        (["mkfs", "a", "b"], "cxlfs mkfs", "unexpected extra argument"),
        (["mkfs", "a", "--sizes", "1G"], "cxlfs mkfs", "no such option"),
        (["mkfs", "a", "--size", "lots"], "cxlfs mkfs", "not a size: 'lots'"),
        (["mount", "a", "b", "--verify", "maybe"], "cxlfs mount", "invalid value for '--verify'"),
        (["mount", "a", "b", "-o", "compress"], "cxlfs mount", "option not known: compress"),
        (["mount", "a", "b", "-o", "commit=soon"], "cxlfs mount", "commit=soon"),
        (["dump", "a", "everything"], "cxlfs dump", "invalid value"),
        (["dump", "a", "inode"], "cxlfs dump", "inode needs a number"),
        (["dump", "a", "inode", "x"], "cxlfs dump", "not an inode number: x"),
        (["dump", "a", "roots", "1"], "cxlfs dump", "roots takes no number"),
        (["fly"], "cxlfs", "no such command 'fly'"),
        (["--fly"], "cxlfs", "no such option"),
    ],
)
def test_wrong_arguments(run: Run, arguments: list[str], command: str, words: str) -> None:
    assert_two_lines(run(*arguments), 2, command, words)


def test_wrong_arguments_with_json(run: Run) -> None:
    said = run("mkfs", "--json")
    assert said.code == 2
    assert said.document["id"] == "usage"
    assert said.document["next_step"] == "see cxlfs mkfs --help"


def test_no_arguments_show_the_help_and_fail(run: Run) -> None:
    said = run()
    assert said.code == 2
    assert "Usage: cxlfs" in said.stderr
    assert all(verb in said.stderr for verb in cli.VERBS)


def test_version(run: Run) -> None:
    said = run("--version")
    assert (said.code, said.stdout) == (0, f"cxlfs, version {__version__}\n")


@pytest.mark.parametrize("verb", cli.VERBS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_teaches(run: Run, verb: str, flag: str) -> None:
    said = run(verb, flag)
    assert said.code == 0
    assert said.stderr == ""
    assert f"Usage: cxlfs {verb}" in said.stdout
    assert f"  cxlfs {verb} " in said.stdout, "an example that can be typed"
    assert "--json" in said.stdout
    assert "Exit codes:" in said.stdout
    assert max(len(line) for line in said.stdout.splitlines()) <= 100


# --- a process ----------------------------------------------------------------------------------


def test_the_program_itself() -> None:
    said = run_program("mkfs", "/nonexistent/file")
    assert_two_lines(said, 16, "cxlfs mkfs", "/nonexistent/file")


def test_a_closed_pipe_is_141_without_a_word(source: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*PROGRAM, "dump", str(source), "segments"],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_full_disk_below_stdout_is_a_failure(source: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*PROGRAM, "list", str(source)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("cxlfs list: No space left on device\nnext: ")
    assert len(done.stderr.splitlines()) == 2


def test_interrupting_the_program(tmp_path: Path) -> None:
    """Ctrl-C while it waits: two lines, no traceback."""
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    code = (
        "import sys, time\nfrom cxlfs.cli import mkfs, main\n"
        f"def wait(*a, **k):\n    open({str(fifo)!r}, 'w').close()\n    time.sleep(60)\n"
        "mkfs.make = wait\nsys.exit(main(['mkfs', 'x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with fifo.open():
        pass
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "cxlfs mkfs: interrupted\nnext: run the command again\n"


def test_a_terminal_gets_colour(source: Path) -> None:
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([*PROGRAM, "status", str(source)], stdout=secondary, env=environment)
    os.close(secondary)
    assert process.wait(60) == 0
    shown = b""
    deadline = time.monotonic() + 10
    while b"errors" not in shown and time.monotonic() < deadline:
        shown += os.read(primary, 65536)
    os.close(primary)
    assert b"\x1b[33mOFFLINE\x1b[0m" in shown


# --- starting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import cxlfs", ["numpy", "trio", "pyfuse3", "click", "cffi", "json", "socket"]),
        *(
            (f"from cxlfs.cli import main; main({arguments})", ["numpy", "trio", "pyfuse3"])
            for arguments in (
                ["--help"],
                ["--version"],
                ["mount", "--help"],
                ["umount", "--help"],
                ["status", "--help"],
                ["list", "--help"],
                ["status"],
            )
        ),
    ],
)
def test_nothing_is_loaded_that_is_not_needed(code: str, absent: list[str]) -> None:
    """Loading numpy takes 150 ms of the processor, trio and pyfuse3 as much again."""
    script = (
        f"import sys; sys.stdout = sys.stderr; {code}; print(*sys.modules, file=sys.__stdout__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _WITH_PATH + script],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "cxlfs" in loaded
    assert sorted(loaded & set(absent)) == []
    limit = 60 if code == "import cxlfs" else 330
    assert len(loaded) < limit, f"{len(loaded)} modules"


_WITH_PATH = f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}; "


def test_ctrl_c_while_python_loads_the_program() -> None:
    """No traceback: the process is gone by the signal, as a shell expects it."""
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from cxlfs.cli import main
main(["status"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_short_help_is_there_for_every_verb() -> None:
    said = run_program("--help")
    for verb in cli.VERBS:
        assert [line for line in said.stdout.splitlines() if line.startswith(f"  {verb} ")]
