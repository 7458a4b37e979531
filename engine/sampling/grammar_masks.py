"""Which tokens a grammar allows next: a function of the output tokens so far, nothing else.

A request's place in its grammar is rebuilt from its tokens wherever it goes on, after a preemption, a hand-off or a
failover; between the steps of one engine it is kept, and only the new tokens are read.

A grammar is compiled once and shared by the requests that name it. Its lexer's states are found as they are needed
and shared too, up to a limit: a request that meets the limit gets a lexer of its own, so that what others wrote does
not decide whether it can go on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from pdserve.errors import ConfigError
from pdserve.grammars import LIMITS, build_grammar_error, build_source
from pdserve.protocol import GrammarSpec
from pdserve.text import Tokenizer, load_tokenizer

_MAX_COMPILED = 32
_NOTHING_FOLLOWS = ("NoExtension", "NoExtensionBias")


class GrammarMask:
    """One request's place in its grammar.

    Args:
        compiled: the grammar at its beginning, shared.
        compile_alone: gives the same with a lexer of its own.
        vocab_size: V.
    """

    def __init__(self, compiled: LLMatcher, compile_alone: Callable[[], LLMatcher], vocab_size: int) -> None:
        self._matcher = compiled.deep_copy()
        self._compile_alone: Callable[[], LLMatcher] | None = compile_alone
        self._vocab_size = vocab_size
        self._num_read = 0

    def find_allowed(self, output_token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[V] the tokens that may come next; at least one.

        Args:
            output_token_ids: all of them so far; those of the last call come first.

        Raises:
            RequestError: the tokens do not follow the grammar, it allows none to follow, or takes too much work.
        """
        allowed_V = self._read(output_token_ids)
        if self._matcher.is_error() and self._compile_alone is not None:
            self._matcher, self._num_read = self._compile_alone(), 0
            self._compile_alone = None
            allowed_V = self._read(output_token_ids)
        if self._matcher.is_error():
            raise build_grammar_error(self._matcher.get_error())
        if not allowed_V.any():
            raise build_grammar_error("no token may follow")
        return allowed_V

    def _read(self, output_token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Read the tokens that are new. Without meaning when the matcher is in an error state then."""
        self._matcher.consume_tokens(output_token_ids[self._num_read :].tolist())
        self._num_read = len(output_token_ids)
        return find_allowed(self._matcher, self._vocab_size)


class GrammarCompiler:
    """Compiles grammars for one model; the first one loads its tokenizer. Any thread may call it.

    Args:
        tokenizer_directory: the model's files.
        vocab_size: V, of the logits.
        eos_token_ids: the tokens that end an answer.
    """

    def __init__(self, tokenizer_directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._directory = tokenizer_directory
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._using = threading.Lock()

    def compile(self, grammar: GrammarSpec) -> LLMatcher:
        """The grammar at its beginning; shared, never to be moved on.

        Raises:
            RequestError: it cannot be followed, or the model has no tokenizer.
        """
        with self._using:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        matcher = self._compile_alone(grammar)
        allowed_V = find_allowed(matcher, self._vocab_size)
        if matcher.stop_reason() in _NOTHING_FOLLOWS or not (matcher.is_error() or allowed_V.any()):
            raise build_grammar_error("nothing satisfies it")
        if matcher.is_error():
            raise build_grammar_error(matcher.get_error())
        with self._using:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def start(self, grammar: GrammarSpec) -> GrammarMask:
        """A request's place in the grammar, before its first token.

        Raises:
            RequestError: as `compile`.
        """
        return GrammarMask(self.compile(grammar), lambda: self._recompile(grammar), self._vocab_size)

    def _recompile(self, grammar: GrammarSpec) -> LLMatcher:
        """One with a lexer of its own; the shared one has met its limit and goes."""
        with self._using:
            self._compiled.pop(grammar, None)
        return self._compile_alone(grammar)

    def _compile_alone(self, grammar: GrammarSpec) -> LLMatcher:
        tokenizer = self._load_tokenizer()
        try:
            source = build_source(grammar)
        except ValueError as error:
            raise build_grammar_error(str(error)) from None
        return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                if not self._eos_token_ids:
                    raise build_grammar_error("the model has no token that ends an answer")
                try:
                    tokenizer = load_tokenizer(self._directory)
                except ConfigError as error:
                    raise build_grammar_error(f"the model's tokenizer cannot be used: {error.message}") from error
                vocabulary = _Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
                self._tokenizer = vocabulary.build_tokenizer()
            return self._tokenizer


def find_allowed(matcher: LLMatcher, vocab_size: int) -> NDArray[np.bool_]:
    """[V] the tokens that may come next; without meaning when the matcher is in an error state then."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of each token, and text cut into tokens.

    Text is cut where the grammar leaves one way to go on: the mask then allows the tokens that the model itself
    would write it with.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)]
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._greedy: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are the text's; the model's own way may put a space in front of it (SentencePiece)."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if b"".join(self.tokens[token_id] for token_id in token_ids) != text.encode() and self._greedy is not None:
            return self._greedy(text)
        return token_ids

    def build_tokenizer(self) -> LLTokenizer:
        """The library's own."""
        built = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self._eos_token_ids)
        self._greedy = built.greedy_tokenize
        return built
