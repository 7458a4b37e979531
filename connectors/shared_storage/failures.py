"""What can go wrong in the directory, as kinds for the counters."""

from __future__ import annotations

import errno

from pdserve.connectors.blocks.failures import Failure

_KINDS = {
    errno.ENOENT: "missing",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
}


def classify_os_error(error: OSError) -> Failure:
    """The failure that an error of the system stands for."""
    return Failure(_KINDS.get(error.errno or 0, "io"), error.strerror or str(error))
