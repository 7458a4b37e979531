"""The sampler of ranks whose logits another rank chooses from: they hear of the tokens with the next step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pdserve.engine.sampling.sampler import SamplerOutput, SamplingRow


class SilentSampler:
    """Chooses nothing, so that there is one truth about what was chosen."""

    def sample(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Nothing."""
        return SamplerOutput()

    def take_likeliest(self, token_ids_R: Tensor, logits_R: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Nothing."""
        return SamplerOutput()
