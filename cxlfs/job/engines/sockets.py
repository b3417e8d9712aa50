"""Links that are one TCP connection: where two ranks meet is said in the job's key-value store.

    rank below      listens, says where, and a word ─►
    rank above      ◄─ connects, says the first half of the word      met, or not ─► (in the store)
    rank below      the other half of it ─►

What is sent goes from the memory of one process into that of the other by the thread that asks for
it: none is woken in between, and who takes it in small bites finds it in the processor's cache.

Never: which rank has what to say to which; goes on without the word that the store has.

Invariants
- Both ends have it, or neither: then nothing is said in the store any more, and it is made of
  something else.
- Nothing waits without a deadline. Callers are served at once, each with one deadline of its own: a
  stranger holds up nobody.
- A loopback address is used by processes of the same host and network alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cxlfs.errors import JobLinkError
from cxlfs.job.engines.callers import Callers
from cxlfs.job.engines.interface import Pending

_HALF_BYTES = 16
_CONNECT_SECONDS = 20.0
"""Until an address that nobody answers at is given up,"""
_UNREACHED_SECONDS = 600.0
"""and not tried again for so long: a firewall costs once, and not with each link."""
BUFFER_BYTES = 4 << 20
"""Of the kernel's, at either end: what one has to do between two pieces does not hold up the
other. It stays in the cache that processors share.
"""
_SIOCGIFADDR = 0x8915
_BEYOND = ("192.0.2.1", "2001:db8::1")
"""Addresses of documentation, to which nothing is sent: the way there is that to other networks."""
_INTERFACE = "GLOO_SOCKET_IFNAME"
_TRANSPORT = "GLOO_DEVICE_TRANSPORT"


class Store(Protocol):
    """What is used of ``torch.distributed.Store``; ``multi_get`` waits until they are there."""

    def set(self, key: str, value: bytes) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def delete_key(self, key: str) -> bool: ...


# --- where --------------------------------------------------------------------------------------


def own_address(hosts: Sequence[str]) -> str:
    """By which others reach this machine, as far as it knows: the first one from which it reaches
    one of these that is not loopback; else that of its way to other networks, or of an interface.
    Loopback: it has no other, or the last of these is meant to be loopback. Raises OSError.

    A name of this machine often means loopback here (127.0.1.1 in /etc/hosts), and to nobody else.
    """
    found, problem = "", OSError("no host")
    is_local = _is_local(hosts[-1])
    beyond = () if is_local else _BEYOND
    for name in (*hosts, *beyond):
        try:
            reached = _from_which(name)
        except OSError as error:
            problem = problem if name in beyond else error
            continue
        if not is_loopback(reached):
            return reached
        found = found or reached
    others = [] if is_local else [each for each in _of_interfaces() if not is_loopback(each)]
    if not found and not others:
        raise problem
    return others[0] if others else found


def _is_local(host: str) -> bool:
    """Whoever reaches that host is on this one."""
    with contextlib.suppress(ValueError):
        return is_loopback(host)
    return host == "localhost"


def is_loopback(address: str) -> bool:
    """Of a numeric address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _from_which(name: str) -> str:
    """The own address from which that host is reached. Raises OSError."""
    family, kind, number, _, address = socket.getaddrinfo(name, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _of_interfaces() -> list[str]:
    """Of those that have one."""
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found.append(_of_interface(name))
    return found


def _of_interface(name: str) -> str:
    """Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        named = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, named)[20:24])


def _here() -> str:
    """The same in processes that reach each other's loopback: of one host, and its one network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"


def _address(host: str) -> str:
    """In the network that gloo uses, too. Raises OSError: there is none, or gloo is told to
    encipher what it sends.
    """
    if os.environ.get(_TRANSPORT, "TCP").upper() not in {"", "TCP", "UV"}:
        raise OSError(f"{_TRANSPORT} is set")
    interface = os.environ.get(_INTERFACE, "").partition(",")[0]
    return _of_interface(interface) if interface else own_address((socket.gethostname(), host))


# --- meeting ------------------------------------------------------------------------------------


def meet(
    store: Store, host: str, side: int, other: int, name: str, seconds: float
) -> SocketLink | None:
    """With rank ``other``, which has the other ``side``; ``host``: where the store is served. None,
    at both ends: they do not reach each other so. Raises RuntimeError of the store, JobLinkError.
    """
    end = time.monotonic() + seconds
    where, met = f"{name}/at", f"{name}/met"
    try:
        found = _called(store, where, met, end) if side else _listened(store, host, where, met, end)
    except OSError as error:
        raise _lost(other, error) from None
    if found is None:
        return None
    _prepare(found)
    return SocketLink(found, other, seconds)


def _prepare(connection: socket.socket) -> None:
    """So that neither end waits for the other where it need not."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, name in ((socket.SO_RCVBUF, "rmem_max"), (socket.SO_SNDBUF, "wmem_max")):
        with contextlib.suppress(OSError, ValueError):
            # Where less is allowed the kernel itself makes them as large as they need to be.
            if int(Path(f"/proc/sys/net/core/{name}").read_text()) >= BUFFER_BYTES:
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    if connection.getsockname()[0] == connection.getpeername()[0]:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _listened(store: Store, host: str, where: str, met: str, end: float) -> socket.socket | None:
    word = secrets.token_bytes(2 * _HALF_BYTES)
    server, said = None, b""
    with contextlib.ExitStack() as steps:
        with contextlib.suppress(OSError):
            address = _address(host)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = steps.enter_context(socket.create_server((address, 0), family=family))
            said = f"{address} {server.getsockname()[1]} {word.hex()} {_here()}".encode()
        store.set(where, said)
        is_met = _said(store, met) == b"1"
        for key in (where, met):
            store.delete_key(key)
        return _accepted(server, word, end) if server is not None and is_met else None


def _accepted(server: socket.socket, word: bytes, end: float) -> socket.socket:
    """Who says the first half of the word; others are sent away. Raises OSError."""
    with Callers(server, word[:_HALF_BYTES]) as callers:
        caller = callers.wait(end)
    try:
        caller.settimeout(_left(end))
        caller.sendall(word[_HALF_BYTES:])
    except OSError:
        caller.close()
        raise
    return caller


def _called(store: Store, where: str, met: str, end: float) -> socket.socket | None:
    told = _said(store, where).decode().split()
    with contextlib.ExitStack() as steps:
        connection = _connected(told[0], int(told[1]), told[3], end) if told else None
        store.set(met, b"0" if connection is None else b"1")
        if connection is None:
            return None
        steps.enter_context(connection)
        word = bytes.fromhex(told[2])
        connection.settimeout(_left(end))
        connection.sendall(word[:_HALF_BYTES])
        if not hmac.compare_digest(_heard(connection), word[_HALF_BYTES:]):
            raise ConnectionError("who answers is not the one that the store speaks of")
        steps.pop_all()
        return connection


_unreached: dict[str, float] = {}
"""Hosts that did not answer, and until when they are not tried again."""


def _connected(host: str, port: int, where: str, end: float) -> socket.socket | None:
    """None: it is not reached so."""
    if is_loopback(host) and where != _here():
        return None
    if time.monotonic() < _unreached.get(host, 0.0):
        return None
    try:
        return socket.create_connection((host, port), min(_left(end), _CONNECT_SECONDS))
    except TimeoutError:
        _unreached[host] = time.monotonic() + _UNREACHED_SECONDS
    except OSError:
        pass
    return None


def _said(store: Store, key: str) -> bytes:
    (said,) = store.multi_get([key])
    return bytes(said)


def _heard(connection: socket.socket) -> bytes:
    """Half a word, or what there was before its end. Raises OSError."""
    heard = b""
    while len(heard) < _HALF_BYTES and (more := connection.recv(_HALF_BYTES - len(heard))):
        heard += more
    return heard


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


# --- the connection -----------------------------------------------------------------------------


class SocketLink:
    """See ``Engine.link``. Its timeouts are the kernel's: a call is one request of it then."""

    is_stream = True

    def __init__(self, connection: socket.socket, other: int, seconds: float) -> None:
        self._socket = connection
        self._other = other
        self._end = time.monotonic() + seconds
        connection.settimeout(None)

    def send(self, data: bytearray | memoryview) -> Pending:
        view = memoryview(data)
        try:
            while view:
                self._limit(socket.SO_SNDTIMEO)
                view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
        except OSError as error:
            raise _lost(self._other, error) from None
        return _DONE

    def receive(self, into: bytearray | memoryview) -> Pending:
        view = memoryview(into)
        try:
            while view:
                self._limit(socket.SO_RCVTIMEO)
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionResetError("Connection closed by peer")
                view = view[count:]
        except OSError as error:
            raise _lost(self._other, error) from None
        return _DONE

    def close(self, *, is_done: bool) -> None:
        """A forked child that has it, too, does not keep the other waiting."""
        del is_done
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit(self, which: int) -> None:
        """Of the next request. Nothing is waited for behind the end."""
        left_us = int(_left(self._end) * 1e6)
        self._socket.setsockopt(socket.SOL_SOCKET, which, _TIME.pack(*divmod(left_us, 1_000_000)))


_TIME = struct.Struct("@ll")


class _Done:
    def wait(self) -> None:
        pass


_DONE = _Done()


def _lost(rank: int, error: OSError) -> JobLinkError:
    if isinstance(error, BlockingIOError | TimeoutError):
        return JobLinkError(f"rank {rank}: timed out")
    if isinstance(error, BrokenPipeError):
        return JobLinkError(f"rank {rank}: Connection closed by peer")
    return JobLinkError(f"rank {rank}: {error.strerror or error}")
