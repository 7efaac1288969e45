"""A model on several ranks that work on the requests of rank 0: only rank 0 needs the texts and the libraries.

rank 0        score(...) or generate(...) -> broadcast the request as JSON -> compute -> result     ... close()
other ranks   serve():                       receive it                    -> compute -> receive ... -> return
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from megalite.generate.generation import Completion, Sampling, TextGenerator, generate_tokens
from megalite.generate.scoring import Continuation, Score, score_continuations
from megalite.parallel.comm import broadcast_, broadcast_int
from megalite.parallel.mesh import Mesh


class ModelRanks:
    """The ranks of a model. Rank 0 calls `score`, `generate` and in the end `close`, and all others call `serve`.

    Attributes:
        model: This rank's part of the model.
    """

    def __init__(self, model: TextGenerator):
        self.model = model

    def score(self, continuations: Sequence[Continuation], batch_size: int) -> list[Score]:
        """Return the scores of continuations (`score_continuations`)."""
        texts = [[list(tokens), num_labels] for tokens, num_labels in continuations]
        return self._run({"score": texts, "batch_size": batch_size})

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        first: int = 0,
        stop_texts: Sequence[str] = (),
    ) -> list[Completion]:
        """Return a completion of each prompt (`generate_tokens`)."""
        request = {
            "generate": [list(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "sampling": asdict(sampling),
            "first": first,
            "stop_texts": list(stop_texts),
        }
        return self._run(request)

    def close(self) -> None:
        """End the other ranks' `serve`."""
        _broadcast_json({}, self.model.mesh)

    def serve(self) -> None:
        """Work on the requests of rank 0 until it calls `close`."""
        while request := _broadcast_json(None, self.model.mesh):
            self._compute(request)

    def _run(self, request: dict[str, Any]) -> Any:
        return self._compute(_broadcast_json(request, self.model.mesh))

    def _compute(self, request: dict[str, Any]) -> Any:
        """Compute a request on this rank; collective over all ranks."""
        if "score" in request:
            continuations = [Continuation(tokens, num_labels) for tokens, num_labels in request["score"]]
            return score_continuations(self.model, continuations, request["batch_size"])
        return generate_tokens(
            self.model,
            request["generate"],
            request["max_new_tokens"],
            Sampling(**request["sampling"]),
            request["first"],
            request["stop_texts"],
        )


def _broadcast_json(value: Any, mesh: Mesh) -> Any:
    """Return rank 0's value, which JSON can express, on every rank. Collective over all ranks."""
    content = json.dumps(value).encode()
    size = broadcast_int(len(content), mesh)
    buffer = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    if mesh.world.is_first:
        buffer.copy_(torch.from_numpy(np.frombuffer(content, np.uint8).copy()))
    return json.loads(broadcast_(buffer, mesh.world).cpu().numpy().tobytes())
