"""Is a request one that an engine can complete rightly? Asked by every back end, answered alike."""

from __future__ import annotations

import dataclasses

import numpy as np

from resources.engines.base import GenerateRequest
from resources.engines.config import check_sampling
from resources.failures import EngineFailure


def checked_request(request: GenerateRequest, vocab_size: int) -> GenerateRequest:
    """The request with int32 ids. Raises EngineFailure when it is malformed."""
    token_ids = np.asarray(request.token_ids)
    if token_ids.ndim != 1 or not len(token_ids) or not np.issubdtype(token_ids.dtype, np.integer):
        raise EngineFailure(
            f"request {request.request_id}: token_ids must be one or more integers in one dimension, got "
            f"shape {token_ids.shape} of {token_ids.dtype}"
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineFailure(
            f"request {request.request_id}: token ids {low} .. {high} leave the vocabulary 0 .. {vocab_size - 1}; "
            "engine and tokenizer must come from one model directory"
        )
    try:
        check_sampling(request.sampling)
    except ValueError as error:
        raise EngineFailure(f"request {request.request_id}: {error}") from error
    return (
        request if token_ids.dtype == np.int32 else dataclasses.replace(request, token_ids=token_ids.astype(np.int32))
    )
