"""The paged-attention engine core that prefill and decode instances share.

``from pdserve.engine import LLM, SamplingParams`` generates offline; `core.EngineCore` is the engine itself.
"""

from typing import TYPE_CHECKING, Any

from pdserve.protocol import SamplingParams

if not __name__.startswith("pdserve."):
    raise ImportError("import this package as pdserve.engine")

if TYPE_CHECKING:
    from pdserve.engine.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Load the offline API on first use: servers and tests of the scheduler do without torch."""
    if name in ("LLM", "Completion"):
        from pdserve.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
