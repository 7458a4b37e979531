from __future__ import annotations

from pdserve import env

env.prepare_for_lmcache()
