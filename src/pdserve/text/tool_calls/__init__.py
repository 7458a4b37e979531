"""Tool calls in a model's answer: the ways models write them, and reading them out of the text as it comes."""

from pdserve.text.tool_calls.formats import FORMATS, ToolCallFormat, find_format
from pdserve.text.tool_calls.reader import ToolCallReader

__all__ = ["FORMATS", "ToolCallFormat", "ToolCallReader", "find_format"]
