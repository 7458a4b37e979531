"""Between text and token ids: tokenizer, chat templates, incremental detokenising, stop strings and tool calls.

Used where tokens become text, in the router and in the offline ``LLM``; the engine sees token ids only.
"""

from pdserve.text.chat_template import ChatTemplate
from pdserve.text.text_stream import TextDelta, TextStream
from pdserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "TextDelta", "TextStream", "Tokenizer", "load_tokenizer"]
