"""Answers of ``/v1/completions``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.protocol import SamplingParams, TokenLogprobs
from pdserve.router.api.answer_types import PromptLogprobs, Usage
from pdserve.router.api.answers import Envelope
from pdserve.router.api.logprobs import describe_completion_logprobs, describe_prompt_logprobs, spell_token
from pdserve.router.api.prepare import PreparedRequest, Prompt
from pdserve.router.choice import ChoiceDelta
from pdserve.text.text_stream import TextStream
from pdserve.text.tokenizer import Tokenizer

_OBJECT = "text_completion"


@dataclass(slots=True)
class _Collected:
    """One choice as far as it has come, for an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprob_sum: float = 0.0
    num_tokens: int = 0

    @property
    def mean_logprob(self) -> float:
        """Of its tokens."""
        return self.logprob_sum / max(self.num_tokens, 1)


class CompletionAnswer:
    """One answer. Use once.

    Args:
        envelope: around each object.
        tokenizer: spells tokens.
        request: what was asked for.
        echo: put the prompt in front of each choice.
        wants_logprobs: whether choices have logprobs.
        wants_prompt_logprobs: whether choices have the prompt's logprobs as a field of their own.
    """

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: Tokenizer,
        request: PreparedRequest,
        *,
        echo: bool,
        wants_logprobs: bool,
        wants_prompt_logprobs: bool,
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._request = request
        self._echo = echo
        self._wants_logprobs = wants_logprobs
        self._wants_prompt_logprobs = wants_prompt_logprobs
        self._collected = [_Collected() for _ in range(request.best_of * len(request.prompts))]
        self._echoed_characters: dict[int, int] = {}
        """Length of the prompt's text in front of each choice that has begun."""

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The streamed object of a delta, if it has anything to show."""
        text, logprobs = self._render(delta)
        if not text and not (logprobs and logprobs["tokens"]) and delta.finish_reason is None:
            return []
        choice = {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        chunk = self._envelope.wrap(_OBJECT, [choice])
        if self._request.include_usage:
            chunk["usage"] = None
        return [chunk]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The streamed object with the usage."""
        return {**self._envelope.wrap(_OBJECT, []), "usage": usage}

    def take(self, delta: ChoiceDelta) -> None:
        """Collect a delta."""
        collected = self._collected[delta.index]
        text, logprobs = self._render(delta)
        collected.text.append(text)
        if logprobs is not None and collected.logprobs is not None:
            for name, items in logprobs.items():
                collected.logprobs[name] += items
        else:
            collected.logprobs = logprobs or collected.logprobs
        if delta.prompt_logprobs is not None and self._wants_prompt_logprobs:
            collected.prompt_logprobs = describe_prompt_logprobs(self._tokenizer, delta.prompt_logprobs)
        collected.finish_reason, collected.stop_reason = delta.finish_reason, delta.stop_reason
        collected.logprob_sum += sum(entry.logprob for entry in delta.logprobs or ())
        collected.num_tokens += len(delta.token_ids)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for index, collected in enumerate(self._choose_shown()):
            choice = {
                "index": index,
                "text": "".join(collected.text),
                "logprobs": collected.logprobs,
                "finish_reason": collected.finish_reason,
                "stop_reason": collected.stop_reason,
            }
            if self._wants_prompt_logprobs:
                choice["prompt_logprobs"] = collected.prompt_logprobs
            choices.append(choice)
        return {**self._envelope.wrap(_OBJECT, choices), "usage": usage}

    def _choose_shown(self) -> list[_Collected]:
        """Of each prompt the n choices that are likeliest by token, best first; in their order if n is all of them."""
        n, best_of = self._request.n, self._request.best_of
        if n == best_of:
            return self._collected
        groups = (self._collected[start : start + best_of] for start in range(0, len(self._collected), best_of))
        return [choice for group in groups for choice in sorted(group, key=lambda one: -one.mean_logprob)[:n]]

    # --- one delta ------------------------------------------------------------------------------------

    def _render(self, delta: ChoiceDelta) -> tuple[str, dict[str, list[Any]] | None]:
        """Text and logprobs of a delta, with the prompt's in front of a choice's first one where echoed."""
        text = delta.text
        echoed: dict[str, list[Any]] | None = None
        if self._echo and delta.index not in self._echoed_characters:
            prompt = self._request.prompts[delta.index // self._request.best_of]
            prompt_text, echoed = self._render_prompt(prompt, delta.prompt_logprobs)
            self._echoed_characters[delta.index] = len(prompt_text)
            text = prompt_text + text
        if not self._wants_logprobs:
            return text, None
        shift = self._echoed_characters.get(delta.index, 0)
        logprobs = describe_completion_logprobs(
            self._tokenizer, delta.logprobs or (), (offset + shift for offset in delta.text_offsets)
        )
        if echoed is not None:
            logprobs = {name: echoed[name] + items for name, items in logprobs.items()}
        return text, logprobs

    def _render_prompt(
        self, prompt: Prompt, entries: list[TokenLogprobs] | None
    ) -> tuple[str, dict[str, list[Any]] | None]:
        """The prompt's text, and where asked for its logprobs; the first token has none."""
        stream = TextStream(self._tokenizer, (), SamplingParams(skip_special_tokens=False))
        pushed = stream.push(prompt.token_ids)
        text = prompt.text if prompt.text is not None else pushed.text + stream.flush()
        if not self._wants_logprobs:
            return text, None
        first, *offsets = pushed.text_offsets
        described = describe_completion_logprobs(self._tokenizer, entries or (), offsets)
        head = {
            "tokens": spell_token(self._tokenizer, prompt.token_ids[0]),
            "token_logprobs": None,
            "top_logprobs": None,
            "text_offset": first,
        }
        return text, {name: [head[name], *items] for name, items in described.items()}
