"""Root mounts a store, and ordinary users ask its daemon: for what is theirs, and for no more."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.cli import Said
from tests.support.mount import Workplace, require_allow_other
from tests.support.other_users import command, why_not

ALICE, BOB = 54_321, 54_322
MAIN = "import sys; from cxlfs.cli import main; sys.exit(main())"
SAVE = """
import os, sys
top, content = sys.argv[1:]
os.makedirs(top, exist_ok=True)
for name in ("a", "b"):
    with open(f"{top}/{name}", "w") as file:
        file.write(content)
"""
REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def cxlfs(uid: int, *arguments: str | Path) -> Said:
    """The command, as run by a user."""
    done = subprocess.run(
        command("-c", MAIN, *map(str, arguments), uid=uid),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def python(uid: int, code: str, *arguments: str | Path) -> None:
    subprocess.run(command("-c", code, *map(str, arguments), uid=uid), cwd="/", check=True)


@pytest.fixture
def shared(unmounted: Workplace) -> Path:
    """A mount that everybody may use, and a directory for all."""
    require_allow_other()
    for directory in (unmounted.root, unmounted.runtime):
        directory.chmod(0o755)
    unmounted.mount("allow_other")
    shared = unmounted.mountpoint / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    return shared


def test_an_owner_gets_back_what_was_hers(shared: Path) -> None:
    own = shared / "alice"
    python(ALICE, SAVE, own, "first")
    python(ALICE, SAVE, own, "second")
    told = cxlfs(ALICE, "history", own / "a", "--json")
    assert (told.code, told.document["versions"][0]["uid"]) == (0, ALICE)
    assert cxlfs(ALICE, "restore", own / "a").code == 0
    assert (own / "a").read_text() == "first"
    python(ALICE, "import os, sys; os.unlink(sys.argv[1])", own / "b")
    assert cxlfs(ALICE, "undelete", own / "b").code == 0
    assert (own / "b").read_text() == "second"
    python(ALICE, "import shutil, sys; shutil.rmtree(sys.argv[1])", own)
    assert cxlfs(ALICE, "undelete", own).code == 0
    assert (own / "a").read_text() == "first"
    python(ALICE, SAVE, own, "third")
    assert cxlfs(ALICE, "restore", own, "--to", shared / "before").code == 0
    assert cxlfs(ALICE, "forget", own).code == 0


def test_a_user_asks_about_what_she_can_read(shared: Path) -> None:
    own = shared / "alice"
    python(ALICE, SAVE, own, "first")
    assert cxlfs(ALICE, "status", shared.parent).code == 0
    assert listed(ALICE, own) == listed(BOB, own) == ["a", "b"]
    own.chmod(0o700)
    assert cxlfs(BOB, "list", shared.parent, "/shared/alice").code != 0
    assert listed(ALICE, own)


def listed(uid: int, directory: Path) -> list[str]:
    told = cxlfs(uid, "list", directory.parents[1], f"/shared/{directory.name}", "--json")
    assert told.code == 0, told.stderr
    (document,) = told.documents
    return [Path(each["path"]).name for each in document["checkpoints"]]


def test_a_user_protects_her_own_directory(shared: Path) -> None:
    own = shared / "alice"
    python(ALICE, SAVE, own, "first")
    set_it = ("policy", "set", own, "--unit", "epoch-*", "--done", "marker")
    assert cxlfs(BOB, *set_it).code != 0
    assert cxlfs(ALICE, *set_it).code == 0
    assert "epoch-*" in cxlfs(ALICE, "policy", "show", own).stdout


def test_nobody_gets_at_what_others_had(shared: Path) -> None:
    own = shared / "alice"
    python(ALICE, SAVE, own, "first")
    python(ALICE, SAVE, own, "second")
    assert cxlfs(BOB, "history", own / "a", "--json").document["versions"] == []
    cxlfs(BOB, "forget", own / "a")
    for verb in ("restore", "undelete"):
        said = cxlfs(BOB, verb, own / "a")
        assert (said.code != 0, "next:" in said.stderr) == (True, True), verb
    assert cxlfs(BOB, "restore", own / "a", "--to", shared / "mine").code != 0
    assert not (shared / "mine").exists()
    assert (own / "a").read_text() == "second"
    assert cxlfs(ALICE, "restore", own / "a").code == 0


def test_a_tree_with_files_of_others_is_roots(shared: Path) -> None:
    """Neither does what others had come back, nor does what they have go."""
    own = shared / "alice"
    python(ALICE, SAVE, own, "first")
    own.chmod(0o777)
    python(BOB, "import sys; open(sys.argv[1], 'w').close()", own / "bobs")
    python(ALICE, "import os, sys; [os.unlink(f'{sys.argv[1]}/{n}') for n in 'ab']", own)
    at = ("--at", "2100-01-01")
    for arguments in ((own,), (own, *at)):
        assert cxlfs(ALICE, "restore", *arguments).code != 0
    assert (own / "bobs").exists()
    (own / "bobs").unlink()
    python(ALICE, "import os, sys; os.rmdir(sys.argv[1])", own)
    said = cxlfs(ALICE, "undelete", own)
    assert (said.code != 0, "another user" in said.stderr) == (True, True)


def test_what_is_roots_says_so(shared: Path) -> None:
    said = cxlfs(ALICE, "verify", shared.parent)
    assert said.code != 0
    assert "root" in said.stderr
    assert "next:" in said.stderr
