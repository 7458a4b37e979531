"""The least time that a model's work takes on a machine: bytes over bandwidth, operations over rate, the greater.

Counts what cannot be avoided: every weight read once a step, every key and value of a context read once for each
token, two operations for each weight and token, and attention. Norms, activations and sampling are left out, so a
floor is a little lower than anything can reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What a machine does with some number of threads.

    Attributes:
        num_threads: that number.
        read_bytes_per_s: memory read.
        copy_bytes_per_s: memory copied (each byte is read and written).
        flops: floating-point operations a second in a matrix product.
    """

    num_threads: int
    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a token of a model costs.

    Attributes:
        body_weights: weights of all layers' matrices.
        head_weights: weights of the output head.
        num_layers: L.
        attention_width: query heads times their dimension, N x H.
        kv_bytes_per_token: keys and values of one token, all layers.
        weight_bytes: bytes of one weight.
    """

    body_weights: int
    head_weights: int
    num_layers: int
    attention_width: int
    kv_bytes_per_token: int
    weight_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, weight_bytes: int) -> ModelCosts:
        """The costs of the model with ``config``, whose weights and KV have ``weight_bytes`` bytes each."""
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        layer = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
        return cls(
            body_weights=config.num_layers * layer,
            head_weights=config.vocab_size * config.hidden_size,
            num_layers=config.num_layers,
            attention_width=width,
            kv_bytes_per_token=2 * config.num_layers * kv_width * weight_bytes,
            weight_bytes=weight_bytes,
        )

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return (self.body_weights + self.head_weights) * self.weight_bytes

    def decode_flops(self, batch_size: int, context_len: float) -> float:
        """Operations of a step that gives ``batch_size`` requests of ``context_len`` tokens one more each."""
        attention = 4 * self.num_layers * self.attention_width * context_len
        return batch_size * (2 * (self.body_weights + self.head_weights) + attention)

    def prefill_flops(self, num_tokens: int) -> float:
        """Operations of a prompt of ``num_tokens``; causal, and the head for its last token only."""
        attention = 2 * self.num_layers * self.attention_width * num_tokens**2
        return 2 * self.body_weights * num_tokens + attention + 2 * self.head_weights

    def decode_step_floor_s(self, rates: MachineRates, batch_size: int, context_len: float) -> float:
        """The least time of such a step."""
        num_bytes = self.step_bytes + batch_size * context_len * self.kv_bytes_per_token
        return max(num_bytes / rates.read_bytes_per_s, self.decode_flops(batch_size, context_len) / rates.flops)

    def prefill_floor_s(self, rates: MachineRates, num_tokens: int) -> float:
        """The least time of a prompt."""
        return max(self.step_bytes / rates.read_bytes_per_s, self.prefill_flops(num_tokens) / rates.flops)

    def batch_floor_s(
        self, rates: MachineRates, prompt_lens: Sequence[int], output_lens: Sequence[int], max_batch_size: int
    ) -> float:
        """The least time for whole requests that decode at most ``max_batch_size`` at a time, always all of them.

        Args:
            rates: the machine's.
            prompt_lens: tokens of each prompt.
            output_lens: tokens of each answer; prefill gives the first of them.
            max_batch_size: requests that run at once.
        """
        prefill_s = sum(self.prefill_floor_s(rates, length) for length in prompt_lens)
        num_decoded = sum(output_lens) - len(output_lens)
        if num_decoded <= 0:
            return prefill_s
        batch_size = min(max_batch_size, len(prompt_lens))
        context_len = (sum(prompt_lens) + sum(output_lens) / 2) / len(prompt_lens)
        num_steps = num_decoded / batch_size
        return prefill_s + num_steps * self.decode_step_floor_s(rates, batch_size, context_len)
