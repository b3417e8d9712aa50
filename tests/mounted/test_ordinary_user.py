"""A user without privileges mounts, uses, unmounts and loses a store, through fusermount3."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.control import mountinfo
from tests.support.mount import Workplace, assert_store_clean
from tests.support.other_users import USER, command, why_not
from tests.support.rights import widened

SETUP = """
import os, signal, stat, sys
from pathlib import Path
from cxlfs.errors import CxlfsError
from cxlfs.control.client import control_request, find_daemons
from cxlfs.daemon.mount import make_config, mount_background, unmount
from cxlfs.media import open_media
from cxlfs.store import Store
source, mnt, log = sys.argv[1:4]

def make_store():
    media = open_media(source)
    Store.format(media)
    media.close()

def mount(*options):
    mount_background(make_config(source, mnt, options=options, log_path=log))
"""


REASON = why_not("fusermount3")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def run_as_user(place: Workplace, code: str) -> str:
    """Run ``code`` after SETUP as USER; returns what it printed."""
    user = pwd.getpwnam(USER)
    for path in (place.source, place.mountpoint, place.runtime, place.root):
        os.chown(path, user.pw_uid, user.pw_gid)
    done = subprocess.run(
        command(
            *("-c", SETUP + textwrap.dedent(code)),
            *(str(place.source), str(place.mountpoint), str(place.log)),
        ),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def fuse_for_everyone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """/dev/fuse as distributions set it up; a bare kernel leaves it to root alone. What is above
    the directories of one process belongs to all that test side by side.
    """
    with widened(Path("/dev/fuse"), 0o666, tmp_path_factory.getbasetemp().parent):
        yield


@pytest.fixture
def place(unmounted: Workplace) -> Workplace:
    return unmounted


def test_rights_stay_wide_until_the_last_process_is_done(tmp_path: Path) -> None:
    """Of three that test side by side, and of who comes when they are gone."""

    def mode() -> int:
        return stat.S_IMODE(device.stat().st_mode)

    device = tmp_path / "device"
    device.touch(mode=0o600)
    with contextlib.ExitStack() as last:
        with widened(device, 0o666, tmp_path):
            last.enter_context(widened(device, 0o666, tmp_path))
            with widened(device, 0o666, tmp_path):
                assert mode() == 0o666
            assert mode() == 0o666
        assert mode() == 0o666
    assert mode() == 0o600
    with widened(device, 0o044, tmp_path):
        assert mode() == 0o644
    assert mode() == 0o600


def test_a_user_mounts_uses_and_unmounts(place: Workplace) -> None:
    out = run_as_user(
        place,
        """
        make_store()
        mount()
        (Path(mnt) / "checkpoint").write_bytes(b"x" * 300000)
        assert os.stat(mnt).st_uid == os.getuid()
        (message,) = control_request(mnt, "status")
        print(message["state"], message["files"])
        unmount(mnt)
        print(os.path.ismount(mnt))
        """,
    )
    assert "ONLINE 1" in out
    assert out.endswith("False\n")
    assert_store_clean(place.source)


def test_odd_names_of_the_source(place: Workplace) -> None:
    """They reach the mount table through fusermount3 as they are."""
    odd = place.root / "a, b\\c 'ä' %41"
    place.source.rename(odd)
    place.source = odd
    out = run_as_user(
        place,
        """
        from cxlfs.control.mountinfo import find_mount
        mount()
        print(ascii(find_mount(mnt).source))
        unmount(mnt)
        """,
    )
    assert out == f"{str(odd)!a}\n"


def test_permissions_are_checked(place: Workplace) -> None:
    """The store was made by root: its root directory is not the user's."""
    out = run_as_user(
        place,
        """
        mount()
        try:
            (Path(mnt) / "file").touch()
        except PermissionError:
            print("refused")
        unmount(mnt)
        """,
    )
    assert out == "refused\n"
    assert Path(place.source).exists()


def test_a_stop_signal_unmounts_cleanly(place: Workplace) -> None:
    run_as_user(
        place,
        """
        mount()
        pid = find_daemons(mnt)[0][1].pid
        watch = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        import select
        assert select.select([watch], [], [], 20)[0]
        assert not os.path.ismount(mnt)
        """,
    )
    assert_store_clean(place.source)


def test_a_killed_daemon_is_cleared_by_the_next_mount(place: Workplace) -> None:
    out = run_as_user(
        place,
        """
        mount()
        pid = find_daemons(mnt)[0][1].pid
        watch = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        import select
        assert select.select([watch], [], [], 20)[0]
        try:
            os.listdir(mnt)
        except OSError as error:
            print(error.strerror)
        mount()
        print(os.listdir(mnt))
        unmount(mnt)
        """,
    )
    assert out == "Transport endpoint is not connected\n[]\n"
    assert mountinfo.find_mount(str(place.mountpoint)) is None


def test_allow_other_is_refused_with_a_reason(place: Workplace) -> None:
    out = run_as_user(
        place,
        """
        if "user_allow_other" in [line.strip() for line in open("/etc/fuse.conf")]:
            print("user_allow_other")
            raise SystemExit
        try:
            mount("allow_other")
        except CxlfsError as error:
            print(error, "|", error.next_step)
        """,
    )
    assert "user_allow_other" in out


def test_a_mount_point_of_someone_else_is_refused(place: Workplace) -> None:
    out = run_as_user(
        place,
        """
        mnt = "/usr"
        try:
            mount()
        except CxlfsError as error:
            print(type(error).__name__, error, "|", error.next_step)
        """,
    )
    assert "MountError no permission to mount on /usr" in out


def test_a_user_has_a_mount_tidied_after_a_crash(place: Workplace) -> None:
    place.announced.append("tidy: set aside: ")
    out = run_as_user(
        place,
        """
        from cxlfs.cli.mount import with_visitor
        make_store()
        mount()
        (Path(mnt) / "half.pt").write_bytes(b"PK" + bytes((3, 4)) + b" and no end")
        os.sync()
        pid = find_daemons(mnt)[0][1].pid
        watch = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        import select
        select.select([watch], [], [], 20)
        mount_background(with_visitor(make_config(source, mnt, options=["tidy"], log_path=log)))
        (message,) = control_request(mnt, "status")
        print(message["tidied"]["state"], message["tidied"]["checkpoints"], os.listdir(mnt))
        unmount(mnt)
        """,
    )
    assert out.splitlines()[-1] == "done 1 ['.cxlfs-aside']"
