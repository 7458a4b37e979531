"""The certificate that clients see."""

from __future__ import annotations

import ssl
from pathlib import Path

from pdserve.errors import ConfigError


class ServerCertificate:
    """A certificate with its key, in a context that new connections are made with.

    Args:
        certificate: PEM file, the chain behind it.
        key: PEM file, not encrypted.

    Attributes:
        context: for the server; `load` changes what it shows to connections from then on.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self.paths = (certificate, key)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def load(self) -> None:
        """Read both files.

        Raises:
            ConfigError: a file cannot be read or does not hold what it should; the context keeps what it had.
        """
        # A context that refuses a new pair has lost its old one, so another one tries it first.
        _load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self.paths)
        _load_into(self.context, *self.paths)


def _load_into(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    for flag, path in (("--tls-certificate", certificate), ("--tls-key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    try:
        # Without a password here OpenSSL would ask for one at the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        reason = (error.reason or "not understood").replace("_", " ").lower()
        raise ConfigError(
            f"--tls-certificate {certificate} and --tls-key {key} are no certificate and its unencrypted key in PEM: "
            f"{reason}"
        ) from None
