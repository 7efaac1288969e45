"""Likelihoods of continuations: equal to transformers' for several families, and under every layout."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_cases import SEQ_LENGTH, VOCAB_SIZE, model_cache
from ranks import run_ranks

from megalite.generate import scoring
from megalite.generate.generation import load_model
from megalite.generate.scoring import Continuation, Score, score_continuations
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.training.setup import SetupError

RNG = random.Random(4)
CONTINUATIONS = [
    Continuation([RNG.randrange(VOCAB_SIZE) for _ in range(length)], num_labels)
    for length, num_labels in ((2, 1), (9, 3), (SEQ_LENGTH + 1, 5), (17, 16), (30, 1), (31, 2), (5, 4))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    return model_cache(tmp_path_factory.mktemp("hf"), with_tokenizer=True)


def transformers_scores(model: Any, continuations: list[Continuation]) -> list[Score]:
    """Return the scores of a model of transformers, one text at a time."""
    scores = []
    for tokens, num_labels in continuations:
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0, -num_labels:]
        labels = torch.tensor(tokens[-num_labels:])
        log_probs = logits.double().log_softmax(-1).gather(-1, labels[:, None])
        scores.append(Score(float(log_probs.sum()), bool((logits.argmax(-1) == labels).all())))
    return scores


def greedy_continuation(model: Any) -> Continuation:
    """Return a text whose last three tokens are those that the model would choose."""
    tokens = [3, 8, 60]
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return Continuation(tokens, 3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gemma2", "deepseek_v3"])
def test_scores_equal_transformers(models, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_LOGITS", 5 * VOCAB_SIZE)  # in several chunks
    reference, model_dir = models(name)
    model = load_model(model_dir, Mesh.single_process())
    continuations = [*CONTINUATIONS, greedy_continuation(reference)]
    expected = transformers_scores(reference, continuations)
    assert [score.is_greedy for score in expected][-1] and not all(score.is_greedy for score in expected)
    for batch_size in (1, 3, 100):
        scores = score_continuations(model, continuations, batch_size)
        assert [s.log_likelihood for s in scores] == pytest.approx([s.log_likelihood for s in expected], rel=1e-5)
        assert [s.is_greedy for s in scores] == [s.is_greedy for s in expected]


def scores_of(model_dir: str, tp: int, pp: int, continuations: list[Continuation]) -> list[Score]:
    model = load_model(model_dir, build_mesh(tp=tp, pp=pp, device=torch.device("cpu")), torch.float64)
    return score_continuations(model, continuations, 3)


@pytest.mark.parametrize(("name", "tp", "pp"), [("llama", 2, 2), ("llama", 4, 1), ("gpt2", 1, 2), ("qwen3_moe", 2, 1)])
def test_scores_are_equal_on_all_ranks_and_layouts(models, name: str, tp: int, pp: int) -> None:
    reference, model_dir = models(name)
    continuations = [*CONTINUATIONS, greedy_continuation(reference)]
    expected = scores_of(str(model_dir), 1, 1, continuations)
    for scores in run_ranks(tp * pp, scores_of, str(model_dir), tp, pp, continuations):
        assert [s.log_likelihood for s in scores] == pytest.approx([s.log_likelihood for s in expected], rel=1e-10)
        assert [s.is_greedy for s in scores] == [s.is_greedy for s in expected]


def test_texts_that_cannot_be_scored_are_refused(models) -> None:
    model = load_model(models("llama")[1], Mesh.single_process())
    for tokens, num_labels in (([1], 1), ([1, 2], 0), ([1] * (SEQ_LENGTH + 2), 1)):
        text = f"text 1 has {len(tokens)} tokens with {num_labels} to score; the model has {SEQ_LENGTH} positions"
        with pytest.raises(SetupError, match=text):
            score_continuations(model, [Continuation([1, 2], 1), Continuation(tokens, num_labels)], 4)
    assert score_continuations(model, [], 4) == []
