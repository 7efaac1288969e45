"""A model of megalite for lm-evaluation-harness. Texts and lengths follow the rules of its Hugging Face model, HFLM."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from megalite.common.console import ProgressBar
from megalite.generate.generation import Sampling
from megalite.generate.model_ranks import ModelRanks
from megalite.generate.scoring import Continuation, Score
from tools.evaluation.harness_tasks import HarnessError

BATCHES_PER_REQUEST = 8  # batches that other ranks are asked for at a time
MAX_NEW_TOKENS = 256  # of generated texts, unless the task says so
SAMPLING_OPTIONS = {"do_sample", "temperature", "top_k", "top_p"}


class HarnessModel(TemplateLM):
    """A model that a run saved, or of Hugging Face, on the ranks of `ModelRanks`; for rank 0.

    An empty context is the token that the tokenizer puts before every text, or else the end of a document.
    """

    def __init__(self, ranks: ModelRanks, batch_size: int):
        super().__init__()
        self._ranks = ranks
        self._batch_size = batch_size
        self._tokenizer = ranks.model.tokenizer
        self._prefix = self._encode("")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self._prefix[-1] if self._prefix else self.eot_token_id

    @property
    def max_length(self) -> int:
        """The number of positions."""
        return self._ranks.model.model_config.max_positions

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end that the tokenizer appends."""
        tokens = self._tokenizer.encode(text)
        return tokens[:-1] if self._tokenizer.ends_texts else tokens

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, with those before every text unless `add_special_tokens` is False.

        A text that already starts with them does not get them twice.
        """
        tokens = self._encode(string)
        num_prefix = len(self._prefix)
        starts_twice = tokens[: 2 * num_prefix] == 2 * self._prefix
        if self._prefix and (add_special_tokens is False or (add_special_tokens is None and starts_twice)):
            return tokens[num_prefix:]
        return tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the scores of (texts, tokens of the context, tokens of the continuation)."""
        continuations = []
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise HarnessError(
                    f"the continuation {texts and texts[1]!r} has {len(continuation)} tokens, the model has "
                    f"{self.max_length} positions; leave its task out"
                )
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            continuations.append(Continuation(tokens, len(continuation)))
        # the longest first, so that a batch has texts of about one length
        order = sorted(range(len(continuations)), key=lambda i: -len(continuations[i].tokens))
        scores: dict[int, Score] = {}
        size = self._batch_size * BATCHES_PER_REQUEST
        with ProgressBar("scoring", len(order), "texts") as bar:
            for start in range(0, len(order), size):
                indices = order[start : start + size]
                results = self._ranks.score([continuations[i] for i in indices], self._batch_size)
                scores.update(zip(indices, results, strict=True))
                bar.add(len(indices))
        return [(scores[i].log_likelihood, scores[i].is_greedy) for i in range(len(continuations))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, which is cut into windows if it is longer than the positions."""
        windows: list[tuple[Any, Sequence[int], Sequence[int]]] = []
        counts = []
        for request in requests:
            (text,) = map(str, request.args)
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            text_windows = [(None, *utils.make_disjoint_window(window)) for window in rolling]
            windows += text_windows
            counts.append(len(text_windows))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(total for total, _ in itertools.islice(scores, count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to a stop text."""
        texts: dict[int, str] = {}
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            options: Any = request.args[-1]
            by_options.setdefault(json.dumps(options, sort_keys=True), []).append(index)
        with ProgressBar("generating", len(requests), "texts") as bar:
            for options_text, group in by_options.items():
                options = json.loads(options_text)
                for start in range(0, len(group), self._batch_size):
                    indices = group[start : start + self._batch_size]
                    contexts = [str(requests[i].args[0]) for i in indices]
                    results = self._generate(contexts, options, indices[0])
                    texts.update(zip(indices, results, strict=True))
                    bar.add(len(indices))
        return [texts[i] for i in range(len(requests))]

    def _generate(self, contexts: Sequence[str], options: dict[str, Any], first: int) -> list[str]:
        """Return the continuations of a batch. `options`: the task's generation_kwargs."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
        stop_texts = handle_stop_sequences(kwargs.pop("until"), eos=self._tokenizer.decode([self.eot_token_id]))
        max_new_tokens = kwargs.pop("max_gen_toks")
        if unknown := sorted(kwargs.keys() - SAMPLING_OPTIONS):
            raise HarnessError(f"generation_kwargs {', '.join(unknown)} are not supported; leave the task out")
        max_context = self.max_length - max_new_tokens
        if max_context < 1:
            raise HarnessError(
                f"a task generates {max_new_tokens} tokens, the model has {self.max_length} positions; leave it out, "
                "or lower its max_gen_toks"
            )
        sampling = Sampling()
        if kwargs.get("do_sample"):
            sampling = Sampling(kwargs["temperature"], kwargs.get("top_k", 0), kwargs.get("top_p", 1.0))
        prompts = [self.tok_encode(context)[-max_context:] or [self.prefix_token_id] for context in contexts]
        stops = [text for text in stop_texts if text]
        completions = self._ranks.generate(prompts, max_new_tokens, sampling, first, stops)
        texts = []
        for completion in completions:
            new_ids = completion.ids[completion.prompt_length :]
            if completion.finish_reason == "eod":
                new_ids = new_ids[:-1]
            texts.append(postprocess_generated_text(self._tokenizer.decode(new_ids), stops, None))
        return texts
