"""Mount options, and the configuration on its way to the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlfs.daemon.options import (
    MountConfig,
    checks_permissions,
    fuse_options,
    helper_options,
    make_config,
)
from cxlfs.errors import UsageError


def test_options_mean_what_they_say() -> None:
    config = make_config(
        "/dev/dax0.0",
        "/mnt",
        options=[
            "ro,verify=off",
            "commit=5.5,allow_other,nosuid",
            "allow_incomplete_overwrite,units=auto",
        ],
    )
    assert config == MountConfig(
        source="/dev/dax0.0",
        mountpoint="/mnt",
        read_only=True,
        verify_reads=False,
        commit_interval_s=5.5,
        allow_other=True,
        allow_incomplete_overwrite=True,
        units="auto",
        kernel_options=("nosuid",),
    )


def test_later_options_and_arguments_win() -> None:
    assert not make_config("/s", "/m", options=["ro", "rw"]).read_only
    assert make_config("/s", "/m", options=["rw"], read_only=True).read_only
    assert make_config("/s", "/m", options=["verify=off"], verify="read").verify_reads


def test_what_fstab_says_to_others_is_ignored() -> None:
    noise = "defaults,noauto,nofail,user,_netdev,x-systemd.automount,x-gvfs-show,relatime,comment=x"
    assert make_config("/s", "/m", options=[noise, "", " "]) == make_config("/s", "/m")


@pytest.mark.parametrize(
    "option",
    [
        *("uid=0", "verify=maybe", "verify", "commit=0", "commit=-1", "commit=x", "commit=nan"),
        *("commit=inf", "commit=90000", "remount", "bind", "fsname=x", "ro=1", "allow_root"),
        *("wakeup_latency", "wakeup_latency=", "wakeup_latency=-1", "wakeup_latency=1000001"),
        *("busy_poll", "busy_poll=", "busy_poll=-1", "busy_poll=1000001", "busy_poll=0.5"),
        *("verified_for", "verified_for=", "verified_for=-1", "verified_for=86401"),
        *(
            "verified_for=0.5",
            "verified_for=inf",
            "wakeup_latency=1e3",
            "wakeup_latency=²",
            f"wakeup_latency={'1' * 5000}",
        ),
    ],
)
def test_what_is_not_understood_is_refused(option: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_config("/s", "/m", options=[option])
    assert option in str(caught.value)


@pytest.mark.parametrize("microseconds", [0, 2, 1_000_000])
def test_times_of_waiting_may_be_asked_for(microseconds: int) -> None:
    config = make_config("/s", "/m", options=[f"wakeup_latency={microseconds}"])
    assert config.wakeup_latency_us == microseconds
    assert MountConfig.from_json(config.to_json()) == config
    config = make_config("/s", "/m", options=[f"busy_poll={microseconds}"])
    assert config.busy_poll_us == microseconds
    assert config.wakeup_latency_us is None
    assert MountConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("seconds", [0, 1, 86_400])
def test_what_was_verified_counts_as_long_as_is_said(seconds: int) -> None:
    config = make_config("/s", "/m", options=[f"verified_for={seconds}"])
    assert config.verified_for_s == seconds
    assert MountConfig.from_json(config.to_json()) == config
    assert make_config("/s", "/m").verified_for_s == 300


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config("image", "a/../mnt")
    assert config.source == str(tmp_path / "image")
    assert config.mountpoint == str(tmp_path / "mnt")


def test_a_configuration_survives_its_way_to_the_daemon() -> None:
    config = make_config("/s ü\udcff", "/m", options=["ro,noexec,commit=1"], debug=True)
    assert MountConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernel_options": []}', "null", "7"])
def test_a_bad_configuration_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        MountConfig.from_json(text)


def test_options_for_the_kernel() -> None:
    config = make_config("/a,b\\c d\nü", "/m", options=["ro,dev,suid,noexec,allow_other"])
    as_root = fuse_options(config, is_root=True)
    assert {"ro", "dev", "suid", "noexec", "allow_other", "default_permissions"} <= as_root
    assert "fsname=/a\\054b\\134c\\040d\\012\\303\\274" in as_root
    assert "subtype=cxlfs" in as_root
    assert not {"dev", "suid"} & fuse_options(config, is_root=False)


def test_options_for_fusermount3() -> None:
    """It takes what follows a backslash as it is: digits would stay digits."""
    config = make_config("/a,b\\c d\nü", "/m", options=["ro,dev,noexec"])
    given = helper_options(config)
    assert "fsname=/a\\,b\\\\c d\nü," in given
    others = given.replace("\\,", "").split(",")
    assert {"subtype=cxlfs", "ro", "noexec", "default_permissions"} <= set(others)
    assert "dev" not in others


@pytest.mark.parametrize(
    ("options", "is_root", "checked"),
    [
        ([], True, False),
        (["allow_other"], True, True),
        (["default_permissions"], True, True),
        ([], False, True),
        (["allow_other"], False, True),
    ],
)
def test_permissions_are_checked_unless_only_root_may_enter(
    options: list[str], is_root: bool, checked: bool
) -> None:
    config = make_config("/a", "/m", options=options)
    assert checks_permissions(config, is_root=is_root) is checked
    assert ("default_permissions" in fuse_options(config, is_root=is_root)) is checked


@pytest.mark.parametrize(
    ("option", "message", "next_step"),
    [
        ("remount", "changes none: remount", "cxlfs umount MOUNTPOINT"),
        ("alow_other", "not known: alow_other", "did you mean allow_other?"),
        ("allow-other", "not known: allow-other", "did you mean allow_other?"),
        ("verfy=off", "not known: verfy=off", "did you mean verify=off?"),
        ("comit=5", "not known: comit=5", "did you mean commit=5?"),
        ("commit", "without a value: commit", "commit=SECONDS"),
        ("verify", "without a value: verify", "verify=read|off"),
        ("zzz", "not known: zzz", "known are ro, rw"),
    ],
)
def test_an_unknown_option_is_answered_with_what_was_meant(
    option: str, message: str, next_step: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make_config("/s", "/m", options=[option])
    assert next_step in caught.value.next_step
