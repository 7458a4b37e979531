"""From workload settings to the requests that are sent."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.workload.dataset_files import PromptRecord, read_prompts, read_sharegpt
from pdserve.bench.workload.lengths import LengthMix
from pdserve.bench.workload.settings import DEFAULT_NUM_REQUESTS, REPLY, WorkloadSettings
from pdserve.bench.workload.synthetic import SyntheticText
from pdserve.errors import ConfigError, RequestError
from pdserve.text.tokenizer import Tokenizer

_WARMUP_SEED_OFFSET = 1_000_003
_CHARACTERS_PER_TOKEN = 4
"""Of English text, where no tokenizer says better."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What is sent: a prompt or a conversation, and the answer's length."""

    max_tokens: int
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and what a reader of the results should know about them.

    Attributes:
        requests: in the order of sending.
        warmups: of the same kind, never equal to one of ``requests`` where prompts are synthetic.
        notes: whole sentences.
    """

    requests: list[BenchRequest]
    warmups: list[BenchRequest]
    notes: tuple[str, ...] = ()


def build_workload(
    settings: WorkloadSettings, tokenizer: Tokenizer | None, *, num_warmups: int, seed: int | None = None
) -> Workload:
    """The requests of a run.

    Args:
        settings: the workload's section.
        tokenizer: the model's; None = lengths of texts are estimates.
        num_warmups: requests beforehand.
        seed: overrides the section's.

    Raises:
        ConfigError: settings that do not go together, or a file without prompts.
    """
    _check(settings)
    seed = settings.seed if seed is None else seed
    if settings.prompts_file is not None:
        return _from_prompts_file(settings, num_warmups, seed)
    if settings.sharegpt is not None:
        return _from_sharegpt(settings, tokenizer, num_warmups, seed)
    count = settings.num_requests or DEFAULT_NUM_REQUESTS
    notes = () if tokenizer is not None else ("Prompt lengths are estimates: no --tokenizer measured them.",)
    return Workload(
        _build_synthetic(settings, tokenizer, count, seed),
        _build_synthetic(settings, tokenizer, num_warmups, seed + _WARMUP_SEED_OFFSET),
        notes,
    )


def _check(settings: WorkloadSettings) -> None:
    if settings.prompts_file is not None and settings.sharegpt is not None:
        raise ConfigError("--prompts-file and --sharegpt are both given; prompts come from one of them")
    if settings.output_tokens == REPLY and settings.sharegpt is None:
        raise ConfigError(f"--output-tokens {REPLY} needs --sharegpt, whose conversations have replies")
    if settings.shared_prefix_tokens and (settings.prompts_file or settings.sharegpt):
        raise ConfigError("--shared-prefix-tokens is for synthetic prompts, not for those of a file")


# --- synthetic ------------------------------------------------------------------------------------------


def _build_synthetic(
    settings: WorkloadSettings, tokenizer: Tokenizer | None, count: int, seed: int
) -> list[BenchRequest]:
    prompt_mix = LengthMix.parse(settings.prompt_tokens, "--prompt-tokens")
    output_mix = LengthMix.parse(settings.output_tokens, "--output-tokens")
    if settings.shared_prefix_tokens >= prompt_mix.shortest:
        raise ConfigError(
            f"--shared-prefix-tokens {settings.shared_prefix_tokens} leaves nothing of the shortest prompt,"
            f" which has {prompt_mix.shortest} tokens"
        )
    generator = random.Random(seed)
    text = SyntheticText(tokenizer, seed)
    prefixes = _build_prefixes(settings, tokenizer)
    return [
        BenchRequest(
            prompt=text.build(prompt_mix.draw(generator), prefixes[index % len(prefixes)]),
            max_tokens=output_mix.draw(generator),
        )
        for index in range(count)
    ]


def _build_prefixes(settings: WorkloadSettings, tokenizer: Tokenizer | None) -> list[str]:
    """The shared prefixes; the same for warm-ups and all runs, as a system prompt is."""
    if not settings.shared_prefix_tokens:
        return [""]
    text = SyntheticText(tokenizer, settings.seed)
    return [text.build(settings.shared_prefix_tokens) for _ in range(settings.num_prefixes)]


# --- files ----------------------------------------------------------------------------------------------


def _from_prompts_file(settings: WorkloadSettings, num_warmups: int, seed: int) -> Workload:
    assert settings.prompts_file is not None
    records = read_prompts(Path(settings.prompts_file))
    count = settings.num_requests or len(records)
    output_mix = LengthMix.parse(settings.output_tokens, "--output-tokens")
    generator = random.Random(seed)
    requests = [_to_request(records[index % len(records)], output_mix.draw(generator)) for index in range(count)]
    return Workload(requests, _repeat(requests, num_warmups), _note_repeats(count, len(records)))


def _from_sharegpt(settings: WorkloadSettings, tokenizer: Tokenizer | None, num_warmups: int, seed: int) -> Workload:
    assert settings.sharegpt is not None
    records, is_cut_off = read_sharegpt(Path(settings.sharegpt))
    notes = [f"The file is cut off; its {len(records):,} whole conversations are used."] if is_cut_off else []
    if tokenizer is None:
        notes.append("Lengths of conversations are estimates: no --tokenizer measured them.")
    generator = random.Random(seed)
    generator.shuffle(records)
    count = settings.num_requests or DEFAULT_NUM_REQUESTS
    chosen = _choose_short_enough(records, settings, tokenizer, count)
    if not chosen:
        raise ConfigError(
            f"--sharegpt {settings.sharegpt} holds no conversation of at most {settings.max_prompt_tokens} prompt"
            " tokens (--max-prompt-tokens)"
        )
    is_reply = settings.output_tokens == REPLY
    output_mix = None if is_reply else LengthMix.parse(settings.output_tokens, "--output-tokens")
    requests = []
    for index in range(count):
        record = chosen[index % len(chosen)]
        length = _count_tokens(record.reply or "", tokenizer) if output_mix is None else output_mix.draw(generator)
        requests.append(_to_request(record, max(length, 1)))
    return Workload(requests, _repeat(requests, num_warmups), (*notes, *_note_repeats(count, len(chosen))))


def _choose_short_enough(
    records: Sequence[PromptRecord], settings: WorkloadSettings, tokenizer: Tokenizer | None, count: int
) -> list[PromptRecord]:
    chosen: list[PromptRecord] = []
    for record in records:
        if len(chosen) == count:
            break
        if 0 < _count_tokens(record.prompt or "", tokenizer) <= settings.max_prompt_tokens:
            chosen.append(record)
    return chosen


def _count_tokens(text: str, tokenizer: Tokenizer | None) -> int:
    """Tokens of ``text``; 0 for what no tokenizer takes, which a server would refuse too."""
    if tokenizer is None:
        return -(-len(text) // _CHARACTERS_PER_TOKEN)
    try:
        return len(tokenizer.encode(text))
    except RequestError:
        return 0


def _to_request(record: PromptRecord, max_tokens: int) -> BenchRequest:
    return BenchRequest(prompt=record.prompt, messages=record.messages, max_tokens=record.max_tokens or max_tokens)


def _repeat(requests: Sequence[BenchRequest], count: int) -> list[BenchRequest]:
    return [requests[index % len(requests)] for index in range(count)]


def _note_repeats(count: int, available: int) -> tuple[str, ...]:
    if count <= available:
        return ()
    return (f"{available} prompts are sent {count} times in all: a server that caches prefixes profits.",)
