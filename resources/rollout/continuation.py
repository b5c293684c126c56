"""What is left of a request whose engine failed, and how is its answer joined? (arXiv 2510.19225, section 4.2)

The next engine gets the prompt plus the tokens already sampled and samples the fewer that are left; versions and
log-probabilities stay those of the engine that sampled each token.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from resources.engines.base import FinishReason, GenerateRequest, Generation


def remainder_of(request: GenerateRequest, parts: list[Generation], attempt: int) -> GenerateRequest | None:
    """What is left of a request after the tokens sampled so far; None when nothing is."""
    sampled = [part.token_ids for part in parts if len(part.token_ids)]
    num_left = request.sampling.max_new_tokens - sum(map(len, sampled))
    if num_left <= 0 < request.sampling.max_new_tokens:
        return None
    return dataclasses.replace(
        request,
        request_id=f"{request.request_id}#{attempt}",
        token_ids=np.concatenate([request.token_ids, *sampled]) if sampled else request.token_ids,
        sampling=dataclasses.replace(request.sampling, max_new_tokens=num_left) if sampled else request.sampling,
    )


def join_parts(request: GenerateRequest, parts: list[Generation], finish_reason: FinishReason) -> Generation:
    """One answer from the parts that several engines sampled."""
    last = parts[-1]
    return Generation(
        request_id=request.request_id,
        trajectory_id=request.trajectory_id,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        finish_reason=finish_reason,
        engine=last.engine,
        hardware_class=last.hardware_class,
        cached_tokens=parts[0].cached_tokens,
        stale_tokens=sum(part.stale_tokens for part in parts),
        queue_s=sum(part.queue_s for part in parts),
        prefill_s=sum(part.prefill_s for part in parts),
        decode_s=sum(part.decode_s for part in parts),
    )
