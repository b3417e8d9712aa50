"""The mount table, the runtime directory, and errors on their way between processes."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cxlfs.control import discovery, mountinfo
from cxlfs.control.wire import error_from_dict, error_to_dict
from cxlfs.daemon import linux, runtime
from cxlfs.daemon.detach import holders_of
from cxlfs.errors import (
    BusyError,
    CorruptionError,
    CxlfsError,
    InvariantError,
    MediaError,
    MountError,
    NoSpaceError,
)

# --- mountinfo ----------------------------------------------------------------------------------

TABLE = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /mnt/a\040b rw,nosuid - fuse.cxlfs /srv/x\054\134y rw,user_id=1000,group_id=5
41 22 0:36 / /mnt/twice rw shared:2 master:1 - tmpfs tmpfs rw
42 41 0:37 / /mnt/twice rw - fuse.cxlfs /dev/dax0.0 rw,user_id=0,group_id=0
43 22 0:38 / /mnt/odd rw - fuse
a line of another form
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_bytes(TABLE)
    return path


def test_the_mount_table_is_read(table: Path) -> None:
    mounts = mountinfo.read_mounts(table)
    assert [mount.mountpoint for mount in mounts] == ["/", "/mnt/a b", "/mnt/twice", "/mnt/twice"]
    assert mounts[1].source == "/srv/x,\\y"
    assert (mounts[1].user_id, mounts[0].user_id) == (1000, None)
    assert mounts[1].device == "0:35"


def test_the_topmost_mount_counts(table: Path) -> None:
    mount = mountinfo.find_mount("/mnt/twice", table)
    assert mount is not None
    assert mount.source == "/dev/dax0.0"
    assert mountinfo.find_mount("/mnt/../mnt/twice/", table) == mount
    assert mountinfo.find_mount("/mnt", table) is None


def test_symbolic_links_on_the_way_to_a_mount_point(tmp_path: Path) -> None:
    (tmp_path / "real" / "mnt").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "direct").symlink_to("real/mnt")
    table = tmp_path / "mountinfo"
    table.write_text(f"42 41 0:37 / {tmp_path}/real/mnt rw - fuse.cxlfs /source rw\n")
    for path in ("real/mnt", "link/mnt", "direct"):
        assert mountinfo.find_mount(str(tmp_path / path), table) is not None


@pytest.mark.parametrize("ask", [mountinfo.answer_of, linux.answer_apart])
def test_a_file_system_that_answers(tmp_path: Path, ask: Callable[[str], OSError | None]) -> None:
    assert ask(str(tmp_path)) is None
    error = ask(str(tmp_path / "none"))
    assert error is not None
    assert error.errno == errno.ENOENT
    assert not mountinfo.is_dead(str(tmp_path))


# --- the runtime directory ----------------------------------------------------------------------


def test_the_runtime_directory_must_be_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    monkeypatch.setenv(discovery.ENVIRONMENT_OVERRIDE, str(directory))
    assert runtime.make_runtime_directory() == directory
    assert directory.stat().st_mode & 0o777 == 0o755
    directory.chmod(0o777)
    with pytest.raises(MountError):
        runtime.make_runtime_directory()
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(MountError):
        runtime.make_runtime_directory()
    monkeypatch.setenv(discovery.ENVIRONMENT_OVERRIDE, str(tmp_path / "a" / "b"))
    with pytest.raises(MountError):
        runtime.make_runtime_directory()


def test_where_it_is_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(discovery.ENVIRONMENT_OVERRIDE, raising=False)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert discovery.runtime_directory() == Path("/run/cxlfs")
    shared = Path("/tmp/cxlfs-54321")  # noqa: S108  only its name is compared
    assert discovery.runtime_directory(54_321) == shared
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert discovery.runtime_directory() == shared  # it belongs to another user
    if own != 0:
        monkeypatch.setattr(os, "geteuid", lambda: own)
        tmp_path.chmod(0o700)
        assert discovery.runtime_directory() == tmp_path / "cxlfs"


def registration(uuid: str, **changes: object) -> discovery.Registration:
    values = {"uuid": uuid, "pid": 1, "source": f"/{uuid}", "mountpoint": f"/mnt/{uuid}"}
    return discovery.Registration(**{**values, **changes})  # type: ignore[arg-type]


def test_registrations(tmp_path: Path) -> None:
    one, two = registration("one"), registration("two", log_path="/x")
    path = runtime.register(tmp_path, one)
    runtime.register(tmp_path, two)
    assert list(discovery.registrations(tmp_path)) == [one, two]
    later = registration("later", mountpoint="/mnt/one")
    runtime.register(tmp_path, later)  # the daemon of "one" was killed
    assert list(discovery.registrations(tmp_path)) == [later, two]
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[]", "null", '{"uuid": 1}', '{"uuid": "other"}', "\udcff"])
def test_broken_registrations_are_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_bytes(os.fsencode(text))
    assert list(discovery.registrations(tmp_path)) == []


def test_registrations_are_found_by_mount_and_by_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(discovery.ENVIRONMENT_OVERRIDE, str(tmp_path))
    (tmp_path / "image").touch()
    (tmp_path / "link").symlink_to("image")
    wanted = registration("one", source=str(tmp_path / "image"))
    runtime.register(tmp_path, wanted)
    runtime.register(tmp_path, registration("two"))
    by_source = list(discovery.find_registrations(source=str(tmp_path / "link")))
    assert by_source == [(tmp_path, wanted)]
    assert list(discovery.find_registrations(source="/nothing")) == []


@pytest.mark.parametrize(
    ("mountpoint", "name"),
    [("/mnt/a", "mnt-a.log"), ("/mnt-a", "mnt--a.log"), ("/", "root.log")],
)
def test_logs_are_named_after_mount_points(tmp_path: Path, mountpoint: str, name: str) -> None:
    assert runtime.default_log_path(tmp_path, mountpoint).name == name
    assert len(runtime.default_log_path(tmp_path, "/x" * 500).name) < 255


# --- errors between processes -------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        BusyError("busy", next_step="wait"),
        MediaError("bad", offset=5, length=7, not_durable=True),
        CorruptionError("bad", structure="root", media_offset=9, expected=1, actual=2),
        NoSpaceError("full", needed_bytes=5, available_bytes=3),
    ],
    ids=lambda error: error.id,
)
def test_an_error_arrives_as_what_it_was(error: CxlfsError) -> None:
    arrived = error_from_dict(json.loads(json.dumps(error_to_dict(error))))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_a_defect_arrives_as_a_plain_failure() -> None:
    arrived = error_from_dict(error_to_dict(InvariantError("broken")))
    assert type(arrived) is CxlfsError
    assert "InvariantError: broken" in str(arrived)


@pytest.mark.parametrize("report", [{}, {"id": 5}, {"id": "unknown", "next_step": []}])
def test_a_report_is_not_trusted(report: dict[str, object]) -> None:
    assert isinstance(error_from_dict(report), CxlfsError)


# --- the kernel ---------------------------------------------------------------------------------


def test_a_service_manager_hears_of_readiness(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        assert linux.notify_service_manager("READY=1", environment)
        assert manager.recv(100) == b"READY=1"
        name = f"\0cxlfs-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
            abstract.bind(name)
            assert linux.notify_service_manager("X=1", {"NOTIFY_SOCKET": "@" + name[1:]})
            assert abstract.recv(100) == b"X=1"
    assert not linux.notify_service_manager("READY=1", environment)  # nobody listens
    assert not linux.notify_service_manager("READY=1", {})
    assert not linux.notify_service_manager("READY=1", {"NOTIFY_SOCKET": "relative"})


def test_protection_is_asked_for_and_not_insisted_on(tmp_path: Path) -> None:
    """In a process of its own: the settings stay with the process."""
    (tmp_path / "self").mkdir()
    score = tmp_path / "self" / "oom_score_adj"
    score.touch()
    code = (
        "import sys; from pathlib import Path; from cxlfs.daemon.linux import protect_process;"
        "print(protect_process(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "'oom_score_adj -1000'" in done.stdout
    assert score.read_text() == "-1000\n"
    done = subprocess.run([*command, "/nowhere"], capture_output=True, text=True, check=True)
    assert "oom_score_adj" not in done.stdout


def test_readahead_is_set_for_the_device(tmp_path: Path) -> None:
    directory = tmp_path / "class" / "bdi" / "0:35"
    directory.mkdir(parents=True)
    (directory / "read_ahead_kb").write_text("128\n")
    assert linux.raise_readahead("0:35", 4096, tmp_path)
    assert (directory / "read_ahead_kb").read_text() == "4096\n"
    assert not linux.raise_readahead("0:99", 4096, tmp_path)


def test_a_connection_is_aborted_where_that_is_possible(tmp_path: Path) -> None:
    directory = tmp_path / "fs" / "fuse" / "connections" / "35"
    directory.mkdir(parents=True)
    assert linux.abort_connection("0:35", tmp_path)
    assert (directory / "abort").read_text() == "1"
    assert not linux.abort_connection("", tmp_path / "nowhere")


def test_who_holds_a_directory(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt-other").mkdir()
    (tmp_path / "mnt" / "file").write_bytes(bytes(4096))
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1);"
        "sys.argv[2] == 'mapped' and f.close(); print('ready', flush=True); sys.stdin.readline()"
    )
    for how in ("open", "mapped"):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "mnt" / "file"), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
        (holder,) = holders_of(str(tmp_path / "mnt"))
        assert holder.startswith(f"{child.pid} (python")
        assert holders_of(str(tmp_path / "mnt-other")) == []
        child.communicate(b"\n")


def test_what_is_done_apart_ends_with_its_errno() -> None:
    linux.call_apart("import sys; sys.exit(len(sys.argv) - 1)")
    for program, number in (
        ("import sys; sys.exit(int(sys.argv[1]))", errno.EBUSY),
        ("import os; os.kill(os.getpid(), 9)", errno.EIO),
    ):
        with pytest.raises(OSError) as caught:
            linux.call_apart(program, str(errno.EBUSY))
        assert caught.value.errno == number


# --- log ------------------------------------------------------------------------------------------


def test_a_name_in_a_message_is_one_line_of_the_log() -> None:
    name = os.fsdecode(b"/\xff\n2026-01-01 ERROR \x1b[31mforged")
    record = logging.makeLogRecord({"msg": "reverted (%s)", "args": (name,)})
    line = runtime.OneLine("%(levelname)s %(message)s").format(record)
    assert line.encode().endswith(rb"reverted (/\xff\n2026-01-01 ERROR \x1b[31mforged)")
    assert "\n" not in line
