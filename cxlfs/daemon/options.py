"""What to mount, where and how: the configuration of one mount, and the meaning of ``-o`` options.

Never here: looking at the machine (``preflight``), mounting (``mount``).

Invariants
- A MountConfig survives ``to_json`` and ``from_json`` unchanged: that is how the daemon gets it.
- An option that would change what is promised is never ignored: unknown ones are refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Iterable, Iterator

from cxlfs.errors import UsageError

TRANSPORTS = ("native", "pyfuse3")
COMMIT_SECONDS_DEFAULT = 30.0
SECONDS_MAX = 86_400
VERIFIED_FOR_SECONDS_DEFAULT = 300
MICROSECONDS_MAX = 1_000_000
TIDY_SECONDS_MAX = 45.0
"""How long unfinished checkpoints are looked for before anybody gets in."""
BUSY_POLL_US_DEFAULT = 100
"""What lies between a save's requests, waking included; longer polling gains nothing more."""

_PASSED_ON = frozenset({"nosuid", "nodev", "noexec", "suid", "dev", "exec", "noatime", "dirsync"})
"""Handed to the kernel as they are. ``dev`` and ``suid`` only take effect for root."""

_IGNORED = frozenset(
    {
        *("defaults", "auto", "noauto", "nofail", "user", "nouser", "users", "owner", "group"),
        *("_netdev", "relatime", "norelatime", "strictatime", "nodiratime", "lazytime", "async"),
        *("nonempty", "atime"),
    }
)
"""Written in fstab for other readers, or always so."""

_TIMES = frozenset({"commit", "verified_for", "busy_poll", "wakeup_latency"})
_CHOICES = {
    "verify": ("read", "off"),
    "transport": TRANSPORTS,
    "units": ("auto", "policy", "off"),
    "tidy": ("off", "unclean", "always"),
    "torn": ("back", "tell", "off"),
    "dedup": ("off", "on"),
}
_SHORT_FORMS = {"tidy": "tidy=unclean"}
_KNOWN_TEXT = (
    "ro, rw, verify=read|off, verified_for=SECONDS, commit=SECONDS, allow_other, "
    "default_permissions, "
    "allow_incomplete_overwrite, units=auto|policy|off, tidy=off|unclean|always, "
    "torn=back|tell|off, dedup=off|on, "
    "transport=native|pyfuse3, busy_poll=MICROSECONDS, "
    "wakeup_latency=MICROSECONDS, nosuid, nodev, noexec, noatime"
)


_FLAGS = ("ro", "rw", "allow_other", "default_permissions", "allow_incomplete_overwrite", "debug")
_NAMES = (*_FLAGS, *sorted(_TIMES), *_CHOICES, *sorted(_PASSED_ON), "remount")


def _known_text() -> str:
    return f"known are {_KNOWN_TEXT}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MountConfig:
    """One mount. Paths are absolute; :func:`make_config` makes them so."""

    source: str
    mountpoint: str
    read_only: bool = False
    verify_reads: bool = True
    """Check every byte read against its checksum."""
    verified_for_s: int = VERIFIED_FOR_SECONDS_DEFAULT
    """How long what a program has verified of a mapped file counts for others, seconds."""
    commit_interval_s: float = COMMIT_SECONDS_DEFAULT
    """How often a file that stays open is committed, seconds."""
    allow_incomplete_overwrite: bool = False
    """When both versions of a file do not fit, give up the old one."""
    units: str = "auto"
    """Which directories are checkpoint units: see ``store.unit_rules.UnitsMode``."""
    tidy: str = "off"
    """When unfinished checkpoints are set aside before anybody gets in: ``unclean``, when the
    store was not closed cleanly, ``always`` or ``off``.
    """
    torn: str = "back"
    """What is done when a program leaves a torn file in place of a whole one: see
    ``store.overwrites.TornMode``.
    """
    dedup: bool = False
    """Parts of files that are the same are kept once: see ``store.deduplicator``."""
    visitor: tuple[str, ...] = ()
    """The command that does it, in a process of its own; the mount point is added to it."""
    allow_other: bool = False
    """Other users may enter."""
    default_permissions: bool = False
    """Permissions are checked even where only root may enter: see ``checks_permissions``."""
    kernel_options: tuple[str, ...] = ()
    transport: str = "native"
    """Who serves file data: threads in C, or pyfuse3's handlers."""
    busy_poll_us: int = BUSY_POLL_US_DEFAULT
    """How long a thread that serves alone looks for the next request before it sleeps; native
    transport.
    """
    wakeup_latency_us: int | None = None
    """How long idle processors may take to wake while mounted; None: as the machine is set."""
    debug: bool = False
    log_path: str | None = None
    """Where a background daemon writes; None: in the runtime directory."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> MountConfig:
        """Raises UsageError when ``text`` does not come from :meth:`to_json`."""
        try:
            values = json.loads(text)
            for name in ("kernel_options", "visitor"):
                values[name] = tuple(values[name])
            return MountConfig(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"not a mount configuration: {error}") from error


def make_config(
    source: str,
    mountpoint: str,
    *,
    options: Iterable[str] = (),
    read_only: bool = False,
    verify: str | None = None,
    allow_other: bool = False,
    transport: str | None = None,
    debug: bool = False,
    log_path: str | None = None,
) -> MountConfig:
    """The configuration that the arguments and the ``-o`` texts (comma-separated) mean.

    Later options win over earlier ones, arguments over options. Raises UsageError.
    """
    config = MountConfig(
        source=os.path.abspath(source),  # noqa: PTH100  Path.absolute keeps ".."
        mountpoint=os.path.abspath(mountpoint),  # noqa: PTH100
        debug=debug,
        log_path=log_path,
    )
    config = with_options(config, options)
    if verify is not None:
        config = _apply(config, f"verify={verify}")
    if transport is not None:
        config = _apply(config, f"transport={transport}")
    return dataclasses.replace(
        config,
        read_only=config.read_only or read_only,
        allow_other=config.allow_other or allow_other,
    )


def with_options(config: MountConfig, options: Iterable[str]) -> MountConfig:
    """``config`` with the ``-o`` texts applied to it. Raises UsageError."""
    for text in options:
        for option in text.split(","):
            config = _apply(config, option.strip())
    return config


def _apply(config: MountConfig, option: str) -> MountConfig:
    option = _SHORT_FORMS.get(option, option)
    key, has_value, value = option.partition("=")
    if not option or option in _IGNORED or key.startswith("x-") or key == "comment":
        return config
    if option in ("ro", "rw"):
        return dataclasses.replace(config, read_only=option == "ro")
    if option == "allow_other":
        return dataclasses.replace(config, allow_other=True)
    if option == "default_permissions":
        return dataclasses.replace(config, default_permissions=True)
    if option == "allow_incomplete_overwrite":
        return dataclasses.replace(config, allow_incomplete_overwrite=True)
    if option == "debug":
        return dataclasses.replace(config, debug=True)
    if option in _PASSED_ON:
        return dataclasses.replace(config, kernel_options=(*config.kernel_options, option))
    if has_value and key in _TIMES:
        return _apply_time(config, key, value)
    if has_value and key in _CHOICES:
        return _apply_choice(config, key, value)
    raise _unknown(option)


def _unknown(option: str) -> UsageError:
    """With the name that was probably meant."""
    if option == "remount":
        return UsageError(
            "cxlfs mount makes mounts and changes none: remount",
            next_step="mount -o remount,... MOUNTPOINT (for ro, rw, suid, dev, exec); or "
            "cxlfs umount MOUNTPOINT, then mount it with the options wanted",
        )
    key, has_value, value = option.partition("=")
    near = difflib.get_close_matches(key.replace("-", "_"), _NAMES, n=1, cutoff=0.7)
    if key in _TIMES | _CHOICES.keys() and not has_value:
        return UsageError(f"mount option without a value: {option}", next_step=_known_text())
    if near:
        meant = near[0] + (f"={value}" if has_value else "")
        return UsageError(
            f"mount option not known: {option}", next_step=f"did you mean {meant}? {_known_text()}"
        )
    return UsageError(f"mount option not known: {option}", next_step=_known_text())


def _apply_time(config: MountConfig, key: str, value: str) -> MountConfig:
    if key == "commit":
        return dataclasses.replace(config, commit_interval_s=_seconds(value))
    if key == "verified_for":
        seconds = _whole(key, value, "seconds", SECONDS_MAX)
        return dataclasses.replace(config, verified_for_s=seconds)
    microseconds = _whole(key, value, "microseconds", MICROSECONDS_MAX)
    if key == "busy_poll":
        return dataclasses.replace(config, busy_poll_us=microseconds)
    return dataclasses.replace(config, wakeup_latency_us=microseconds)


def _apply_choice(config: MountConfig, key: str, value: str) -> MountConfig:
    if value not in _CHOICES[key]:
        known = " or ".join(f"{key}={choice}" for choice in _CHOICES[key])
        raise UsageError(f"{key}={value}: not known", next_step=f"use {known}")
    if key == "verify":
        return dataclasses.replace(config, verify_reads=value == "read")
    if key == "units":
        return dataclasses.replace(config, units=value)
    if key == "tidy":
        return dataclasses.replace(config, tidy=value)
    if key == "torn":
        return dataclasses.replace(config, torn=value)
    if key == "dedup":
        return dataclasses.replace(config, dedup=value == "on")
    return dataclasses.replace(config, transport=value)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= SECONDS_MAX:
        raise UsageError(
            f"commit={text}: not a time",
            next_step=f"give seconds, more than 0 and at most {SECONDS_MAX}",
        )
    return seconds


def _whole(key: str, text: str, unit: str, maximum: int) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not is_number or int(text) > maximum:
        raise UsageError(
            f"{key}={text}: not a time", next_step=f"give whole {unit}, 0 to {maximum}"
        )
    return int(text)


def weakened(config: MountConfig) -> Iterator[str]:
    """What a mount with these options does not promise, for people."""
    seconds = config.commit_interval_s
    if not config.verify_reads:
        yield "what is read is not compared with its checksum (verify=off)"
    if config.allow_incomplete_overwrite:
        yield (
            "a crash while a file is overwritten loses both versions (allow_incomplete_overwrite)"
        )
    if seconds > COMMIT_SECONDS_DEFAULT:
        yield (
            f"a crash may lose the last {seconds:g} s of a file that stays open "
            f"(commit={seconds:g})"
        )


def checks_permissions(config: MountConfig, *, is_root: bool) -> bool:
    """The kernel is to check permissions. Not where only root may enter, who may do all: it would
    ask for the attributes of a directory after each change in it, which is two of the eight
    questions that saving a small file over an old one takes.
    """
    return not is_root or config.allow_other or config.default_permissions


def fuse_options(config: MountConfig, *, is_root: bool) -> set[str]:
    """The options for libfuse, escaped as its parser and an ASCII argument list want them."""
    return _options(config, _escape(config.source), is_root=is_root)


def helper_options(config: MountConfig) -> str:
    """The argument of fusermount3's -o, for an ordinary user. It reads no digits: whatever follows
    a backslash stands for itself (libfuse, util/fusermount.c).
    """
    source = config.source.replace("\\", "\\\\").replace(",", "\\,")
    return ",".join(sorted(_options(config, source, is_root=False)))


def _options(config: MountConfig, escaped_source: str, *, is_root: bool) -> set[str]:
    options = {
        f"fsname={escaped_source}",
        "subtype=cxlfs",
        "ro" if config.read_only else "rw",
    }
    options.update(o for o in config.kernel_options if is_root or o not in ("dev", "suid"))
    if config.allow_other:
        options.add("allow_other")
    if checks_permissions(config, is_root=is_root):
        options.add("default_permissions")
    return options


def _escape(text: str) -> str:
    """Commas and backslashes end or escape an option, and pyfuse3 passes ASCII only: libfuse reads
    a backslash with three octal digits as one byte.
    """
    plain = "".join(map(chr, range(0x21, 0x7F))).replace("\\", "").replace(",", "")
    return "".join(
        chr(byte) if chr(byte) in plain else f"\\{byte:03o}" for byte in os.fsencode(text)
    )
