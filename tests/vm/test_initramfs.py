"""What the guest boots from: the archive format and the order of kernel modules."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.vm.initramfs import command_script, cpio, module_files


def unpack(archive: bytes) -> list[tuple[str, int, bytes]]:
    """A second reading of the format's description: 110 bytes of header, name, data, each of the
    last two padded to 4 bytes.
    """
    entries: list[tuple[str, int, bytes]] = []
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_size]
        assert name.endswith(b"\0")
        at = -(-(at + 110 + name_size) // 4) * 4
        data = archive[at : at + size]
        at = -(-(at + size) // 4) * 4
        if name == b"TRAILER!!!\0":
            assert at == len(archive)
            return entries
        entries.append((name[:-1].decode(), mode, data))


def test_the_archive_holds_what_was_put_in() -> None:
    entries = [
        ("bin", 0o040755, b""),
        *((f"bin/{'x' * length}", 0o100755, bytes(range(length))) for length in range(1, 9)),
    ]
    assert unpack(cpio(entries)) == entries


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text(
        "kernel/a.ko.xz: kernel/b-1.ko.xz kernel/c.ko.xz\n"
        "kernel/b-1.ko.xz: kernel/c.ko.xz\n"
        "kernel/c.ko.xz:\n"
        "kernel/soft.ko.xz:\n"
    )
    (tmp_path / "modules.softdep").write_text("# none\nsoftdep b_1 pre: soft post: c\n")
    names = [path.name for path in module_files(tmp_path, ["a", "built_in", "c"])]
    assert names == ["c.ko.xz", "soft.ko.xz", "b-1.ko.xz", "a.ko.xz"]


def test_the_command_reaches_the_shell_unharmed() -> None:
    script = command_script(["echo", "it's; $HOME"], Path("/a b"), {"X": "1 2"})
    lines = script.splitlines()
    assert shlex.split(lines[0])[:2] == ["cd", "/a b"]
    assert shlex.split(lines[1]) == ["export", "X=1 2"]
    assert shlex.split(lines[2]) == ["exec", "echo", "it's; $HOME"]
