"""Tool calls in a model's answer: the ways models write them, having them written, and reading them as they come."""

from pdserve.text.tool_calls.call_grammar import build_call_grammar
from pdserve.text.tool_calls.formats import FORCED_FORMAT, FORMATS, ToolCallFormat, find_format
from pdserve.text.tool_calls.reader import ToolCallReader

__all__ = ["FORCED_FORMAT", "FORMATS", "ToolCallFormat", "ToolCallReader", "build_call_grammar", "find_format"]
