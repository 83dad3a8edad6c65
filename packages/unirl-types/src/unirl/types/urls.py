"""Addresses of services, which may hold a user and a password that no log, error or record shall show."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from unirl.types.errors import ConfigError

_CREDENTIALS = re.compile(r"(?<=://)\S*@")
"""To the last @, since a password that is not percent-encoded may hold / and # too."""


def without_credentials(text: str) -> str:
    """A text without what stands before the @ of the addresses in it."""
    return _CREDENTIALS.sub("", text)


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """The address without user and password, and these two, decoded; None where it has none.

    Raises ConfigError, without the password, for an address whose @ is no end of a user and password.
    """
    if "@" not in url:
        return url, None
    parts = urlsplit(url)
    before, at, host = parts.netloc.rpartition("@")
    if not at:
        raise ConfigError(
            f"the address {without_credentials(url)} has an @ after its host. Write the / # ? and @ of a password as "
            "%2F %23 %3F and %40."
        )
    user, _, password = before.partition(":")
    return parts._replace(netloc=host).geturl(), (unquote(user), unquote(password))
