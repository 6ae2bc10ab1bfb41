"""What the environment chooses for the connections between nodes: the secret, and the network interface.

Note "The secret of a run": rank 0 draws random bytes, and the ranks learn them at the rendezvous. The store
of the launcher knows no authentication, so whoever reaches it can read them. A secret of the user never
passes through the store. If there is one, the secret of the run is a digest of both.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping

from shardproof.errors import StorageError

SECRET, SECRET_FILE = "SHARDPROOF_NODES_SECRET", "SHARDPROOF_NODES_SECRET_FILE"
_INTERFACE = "SHARDPROOF_NODES_INTERFACE"
_LEAST, _MOST = 16, 4096
"""Bytes of a secret of the user."""
_SIOCGIFADDR = 0x8915
"""The request of Linux for the IPv4 address of an interface."""


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the user, from SHARDPROOF_NODES_SECRET_FILE or SHARDPROOF_NODES_SECRET; empty for none.

    Raises:
        StorageError: the file cannot be read, or the secret has fewer than 16 or more than 4096 bytes, or
            both variables are set.

    >>> own_secret({}), own_secret({"SHARDPROOF_NODES_SECRET": "correct horse battery"})
    (b'', b'correct horse battery')
    """
    path, text = environment.get(SECRET_FILE), environment.get(SECRET)
    if path and text:
        raise StorageError(f"{SECRET_FILE} and {SECRET} are both set: unset one of them")
    if not path and not text:
        return b""
    name = f"{SECRET_FILE} ({path})" if path else SECRET
    try:
        if path:
            with open(path, "rb") as file:
                secret = file.read(_MOST + 1).strip()
        else:
            secret = (text or "").encode("utf-8", "surrogateescape").strip()
    except OSError as error:
        raise StorageError(f"{name}: the secret of the run cannot be read: {error}", file=path) from error
    if not _LEAST <= len(secret) <= _MOST:
        raise StorageError(
            f"{name}: the secret of the run has {len(secret)} bytes, expected {_LEAST} to {_MOST}. Make one "
            "with: openssl rand -hex 32"
        )
    return secret


def combined_secret(of_store: bytes, own: bytes) -> bytes:
    """The secret of a run; see note "The secret of a run".

    >>> combined_secret(b"drawn", b""), len(combined_secret(b"drawn", b"of the user"))
    (b'drawn', 32)
    """
    return hmac.digest(own, of_store, hashlib.sha256) if own else of_store


def chosen_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """The address of SHARDPROOF_NODES_INTERFACE, an interface or a numeric address; None if it is not set.

    Raises:
        StorageError: there is no such interface, it has no IPv4 address, or the address is unspecified.

    >>> chosen_address({}), chosen_address({"SHARDPROOF_NODES_INTERFACE": "::1"})
    (None, '::1')
    """
    name = environment.get(_INTERFACE)
    if not name:
        return None
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        pass  # the name of an interface
    else:
        if address.is_unspecified:
            raise StorageError(
                f"{_INTERFACE}={name} is no address that other nodes can connect to. Unset it to listen on "
                "all interfaces, or name one of them"
            )
        return str(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", os.fsencode(name)[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError as error:
        known = ", ".join(label for _, label in socket.if_nameindex())
        raise StorageError(
            f"{_INTERFACE}={name}: this node has no such interface with an IPv4 address ({error}). It has "
            f"{known}. Name one of them, or give an address"
        ) from error
