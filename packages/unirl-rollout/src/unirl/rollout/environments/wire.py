"""Objects between a run and the processes of its environments.

Pickled, since actions and observations are of any class: both ends run the same code of the same user, the pipe is
private, and nothing that a model wrote is executed in either process.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

from unirl.types.errors import ConfigError


def packed(value: object) -> bytes:
    """An object on its way, which a member of a pool passes on as it is."""
    return pickle.dumps(value)


def unpacked(value: bytes) -> Any:  # Any: what the other end sent
    """An object that has arrived."""
    return pickle.loads(value)  # noqa: S301 - see above


def send(connection: Connection, value: object) -> None:
    """Raises OSError if the other end is closed."""
    connection.send_bytes(packed(value))


def receive(connection: Connection) -> Any:  # Any: what the other end sent
    """The next object. Raises EOFError or OSError if the other end is closed."""
    return unpacked(connection.recv_bytes())


def require_sendable(environment: object) -> None:
    """Raise ConfigError if the object of a recipe cannot be sent to the processes that play."""
    if type(environment).__module__ == "__main__":
        raise ConfigError(
            f"{type(environment).__name__} is defined in the script that runs, which the processes that play do not "
            "import. Move it into a module next to the script."
        )
    try:
        pickle.dumps(environment)
    except Exception as error:
        raise ConfigError(
            f"{type(environment).__name__} cannot be sent to the processes that play ({error}). Let its constructor "
            "keep plain values, and open files and connections in reset."
        ) from error


def digest(value: object) -> bytes:
    """Equal for equal objects: without the memo of pickle, which also says which parts are one object."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.fast = True
    pickler.dump(value)
    return hashlib.sha256(written.getvalue()).digest()
