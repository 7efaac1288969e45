"""Scores of requests by likelihood: equal to transformers under every layout, and files that cannot be used."""

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hugging_face_cases import NUM_DEPTHS, VOCAB_SIZE, copy_model, in_fp64, load_in_fp64, model_cache, with_depths
from program_runs import load_json_lines, load_losses, load_status, run_pretrain
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_metrics import events
from token_files import byte_level_bpe
from train_cases import SMALL_RUN, config_from, pretrain, run_from

from megalite.config.options import ConfigError
from megalite.data.datasets.requests import (
    NO_REQUEST,
    Request,
    encode_request,
    open_requests,
    pack_requests,
    read_requests,
    score_tasks,
)
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.training.checkpointing import initial_state
from megalite.training.evaluation import request_losses

SEQ_LENGTH = 16
EOD = VOCAB_SIZE - 1
FLAGS = (
    f"--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --mock-data --eval-iters 0 --seq-length "
    f"{SEQ_LENGTH} --hidden-dropout 0 --attention-dropout 0 --device cpu --use-checkpoint-args --tokenizer-type "
    f"NullTokenizer --vocab-size {VOCAB_SIZE}"
)
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "ZeRO-3": "--zero-stage 3",
}
EP2 = {"ep2": "--expert-model-parallel-size 2", "tp2 ep2": "--tensor-model-parallel-size 2 --ep 2"}
VPP2 = {"vpp2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2"}
CASES = {
    "llama": {**LAYOUTS, **VPP2},
    "gpt2": {name: LAYOUTS[name] for name in ("cp2", "pp2")},  # learned positions
    "gemma2": {name: LAYOUTS[name] for name in ("tp2", "cp2")},  # windows and caps
    "qwen3_moe": {**EP2, "ZeRO-3": LAYOUTS["ZeRO-3"]},
    "qwen3_next": {"tp2 ep2": EP2["tp2 ep2"], "cp2": LAYOUTS["cp2"]},  # recurrent layers
    "glm4_moe": {"pp2": LAYOUTS["pp2"], "ZeRO-3": LAYOUTS["ZeRO-3"], "ep2": EP2["ep2"]},  # multi-token prediction
}


def random_text(rng: random.Random, low: int, high: int) -> str:
    return " ".join(str(rng.randrange(EOD)) for _ in range(rng.randrange(low, high)))


def random_rows() -> list[dict[str, Any]]:
    """Return requests of three tasks, as lines of a file; some contexts are empty, or too long for a sample."""
    rng = random.Random(5)
    rows: list[dict[str, Any]] = []
    for task, num_questions, num_answers in (("choice", 9, 3), ("other.task-2", 5, 4), ("single", 4, 1)):
        for question in range(num_questions):
            context = "" if question == 2 else random_text(rng, *((20, 30) if question == 3 else (1, 10)))
            gold = rng.randrange(num_answers)
            for answer in range(num_answers):
                continuation = f" {random_text(rng, 1, 6)}"
                rows.append(
                    dict(task=task, id=question, context=context, continuation=continuation, gold=int(answer == gold))
                )
    rng.shuffle(rows)  # the answers to a question need not be neighbors
    return rows


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def requests_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("requests") / "requests.jsonl", random_rows())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    return model_cache(tmp_path_factory.mktemp("hf"), num_layers=4)


def losses_of(model_dir: str, requests: str, layouts: Sequence[str], dtypes: Sequence[str]) -> list[list[float]]:
    """Return this rank's losses of all requests, for each layout in the dtype with its index."""
    losses = []
    for layout, dtype in zip(layouts, dtypes, strict=True):
        argv = f"{FLAGS} --load {model_dir} --eval-requests {requests} {layout}"
        config = initial_state.complete_config(config_from(argv))
        run = run_from(config, dtype=getattr(torch, dtype))
        assert initial_state.load_external_model(run, config) is not None
        assert run.requests is not None
        losses.append(request_losses(run, run.requests).tolist())
    return losses


def transformers_losses(model: Any, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the negative log-likelihoods that a model of transformers in fp64 gives, one request at a time."""
    losses = []
    for row in rows:
        context = [int(i) for i in row["context"].split()] or [EOD]
        continuation = [int(i) for i in row["continuation"].split()]
        ids = (context + continuation)[-SEQ_LENGTH - 1 :]
        with in_fp64(), torch.no_grad():
            log_probs = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        own = log_probs[-len(continuation) :].gather(-1, torch.tensor(continuation)[:, None])
        losses.append(-float(own.sum()))
    return losses


def expected_scores(rows: Sequence[dict[str, Any]], losses: Sequence[float], task: str) -> dict[str, float]:
    """Return accuracy, normalized accuracy and bits per byte of a task by plain loops."""
    right = right_norm = choices = 0
    bits, length = 0.0, 0
    for question in {row["id"] for row in rows if row["task"] == task}:
        answers = [i for i, row in enumerate(rows) if (row["task"], row["id"]) == (task, question)]
        sums = torch.tensor([-losses[i] for i in answers], dtype=torch.float64)
        lengths = torch.tensor([len(rows[i]["continuation"].encode()) for i in answers])
        gold = next(n for n, i in enumerate(answers) if rows[i]["gold"])
        choices += len(answers) > 1
        right += len(answers) > 1 and int(sums.argmax()) == gold
        right_norm += len(answers) > 1 and int((sums / lengths).argmax()) == gold
        bits -= float(sums[gold]) / float(torch.tensor(2.0, dtype=torch.float64).log())
        length += int(lengths[gold])
    scores = {"acc": right / choices, "acc_norm": right_norm / choices} if choices else {}
    return {**scores, "bpb": bits / length}


def without_depths(model_dir: Path, target: Path) -> Path:
    """Write a model without its depths of multi-token prediction, and return its directory."""
    copy_model(model_dir, target)
    tensors = load_file(target / "model.safetensors")
    num_layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    depths = tuple(f"model.layers.{num_layers + n}." for n in range(NUM_DEPTHS))
    save_file({key: x for key, x in tensors.items() if not key.startswith(depths)}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", CASES)
def test_losses_and_choices_equal_transformers_under_every_layout(
    models, requests_file: Path, tmp_path: Path, name: str
) -> None:
    rows = random_rows()
    if name == "glm4_moe":
        model_dir, _ = with_depths(name, tmp_path)
        reference_dir = without_depths(model_dir, tmp_path / "reference")
    else:
        _, model_dir = models(name)
        reference_dir = model_dir
    expected = transformers_losses(load_in_fp64(reference_dir), rows)
    assert np.std(expected) > 1 and min(expected) > 0.5
    fp64, fp32 = losses_of(str(model_dir), str(requests_file), ["", ""], ["float64", "float32"])
    assert fp64 == pytest.approx(expected, rel=1e-9)
    assert fp32 == pytest.approx(expected, rel=1e-5)
    layouts = CASES[name]
    args = (str(model_dir), str(requests_file), list(layouts.values()), ["float64"] * len(layouts))
    for ranks_losses in run_ranks(2, losses_of, *args):
        for layout, losses in zip(layouts, ranks_losses, strict=True):
            assert losses == pytest.approx(expected, rel=1e-9), layout
    scores = score_tasks(read_requests(str(requests_file)), np.array(fp64))
    assert list(scores) == list(dict.fromkeys(row["task"] for row in rows))
    for task, task_scores in scores.items():
        assert task_scores.values == pytest.approx(expected_scores(rows, expected, task), rel=1e-9)


# ---- files

GOOD = {"task": "a", "id": 1, "context": "1 2", "continuation": " 3", "gold": 1}
ERRORS = {  # message -> the lines of a file
    "requests.jsonl: no request is in it": [],
    "line 2: not JSON (": [GOOD, "{'task'"],
    "line 1: not an object": [[1]],
    "line 1: gold missing; give task, id,": [{key: value for key, value in GOOD.items() if key != "gold"}],
    "line 3: unknown key 'choices'; remove it, the keys are task, id,": [GOOD, GOOD, GOOD | {"choices": 4}],
    "line 1: id=None is not a text; give one": [GOOD | {"id": None}],
    "line 1: context=3 is not a text; give one": [GOOD | {"context": 3}],
    "line 1: gold=True is not a number; give one": [GOOD | {"gold": True}],
    "line 1: gold=2 is neither 1, for a right answer, nor 0;": [GOOD | {"gold": 2}],
    "line 1: task='a/b' is not a name of letters, digits": [GOOD | {"task": "a/b"}],
    "line 1: the continuation is empty": [GOOD | {"continuation": ""}],
    "line 1: bytes=0 is not a whole number from 1 to 2^30": [GOOD | {"bytes": 0}],
    "line 1: bytes=1000": [GOOD | {"bytes": 10**400}],
    "line 2: context has '\\ud800', half of a pair of surrogates; remove it": [GOOD, GOOD | {"context": "1 \ud800"}],
    "line 2: no answer to this question of a is right": [GOOD, GOOD | {"id": "1", "gold": 0}],
    "line 1: the continuation has no token of its own": [GOOD | {"continuation": " "}],
    "line 2: the continuation has 17 tokens, more than seq_length 16": [GOOD, GOOD | {"continuation": " 1" * 17}],
    "line 2: NullTokenizer(93) reads ids, as in '17 4 25', not": [GOOD, GOOD | {"context": "word"}],
    "line 1: NullTokenizer(93) has ids 0 to 92, not 1 to 93": [GOOD | {"continuation": " 93"}],
}


@pytest.mark.parametrize("message", ERRORS)
def test_unusable_file_is_refused_with_its_line(tmp_path: Path, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in ERRORS[message]))
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}.*{re.escape(message.removeprefix(path.name))}"):
        open_requests(str(path), build_tokenizer("NullTokenizer", vocab_size=VOCAB_SIZE), SEQ_LENGTH)


def test_run_refuses_requests_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="eval_requests needs --tokenizer-type"):
        config_from([*SMALL_RUN, "--train-iters", "1", "--eval-requests", "x.jsonl"])
    flags = [*SMALL_RUN, "--train-iters", "1", "--tokenizer-type", "NullTokenizer", "--dry-run", "--eval-requests"]
    missing = run_pretrain(*flags, tmp_path / "none.jsonl")
    assert missing.returncode == 3
    assert missing.stderr.count("none.jsonl': No such file or directory; megalite eval --write-requests makes") == 1
    damaged = run_pretrain(*flags, write_rows(tmp_path / "damaged.jsonl", [GOOD, 7]))
    assert damaged.returncode == 3 and "damaged.jsonl, line 2: not an object" in damaged.stderr
    assert "Traceback" not in missing.stderr + damaged.stderr


def test_requests_are_packed_once_each_and_apart(requests_file: Path) -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=VOCAB_SIZE)
    request_set = open_requests(str(requests_file), tokenizer, SEQ_LENGTH)
    packed = pack_requests(request_set)
    num_tokens = sum(map(len, request_set.tokens))
    assert num_tokens / (SEQ_LENGTH + 1) <= len(packed.samples) < 0.7 * len(request_set.tokens)
    assert sorted(i for sample in packed.samples for i in sample) == list(range(len(request_set.tokens)))
    micro = packed.micro_batch(np.arange(len(packed.samples) + 2))
    assert micro.request_ids is not None and micro.document_start is not None and micro.padding is not None
    for row, column in np.argwhere(micro.request_ids != NO_REQUEST):
        request = int(micro.request_ids[row, column])
        start = micro.document_start[row, column]
        visible = micro.tokens[row, start : column + 2].tolist()
        assert visible == list(request_set.tokens[request][: len(visible)])
        assert len(visible) > len(request_set.tokens[request]) - request_set.num_labels[request]
    counts = np.unique_counts(micro.request_ids[micro.request_ids != NO_REQUEST]).counts
    assert counts.tolist() == list(request_set.num_labels)
    assert micro.padding[-2:].all() and (micro.request_ids[-2:] == NO_REQUEST).all()
    assert request_set.num_cut == 8  # 3 + 4 + 1 answers to a question with a long context
    assert "18 questions of 3 tasks, 51 requests; 8 contexts are cut on the left" in request_set.describe("x")


TEXTS = [
    ("The capital of France is", " Paris"),
    ("a b  ", "c"),  # white space at the end of the context
    ("", "Paris"),
    ("   ", "Paris"),
    ("def f(x):", "\n    return x"),
]


def bpe(directory: Path, prefix: str) -> Any:
    """Write a byte-level BPE tokenizer, which starts each text with a token if `prefix` is one, and return its directory."""
    from tokenizers import processors

    texts = [context + continuation for context, continuation in TEXTS]
    model = byte_level_bpe(texts, 280, ["<|endoftext|>", "<s>"])
    if prefix:
        model.post_processor = processors.TemplateProcessing(single=f"{prefix} $A", special_tokens=[("<s>", 1)])
    model.save(str(directory / "tokenizer.json"))
    return model


@pytest.mark.parametrize("prefix", ["", "<s>"])
def test_tokens_of_a_request_are_those_of_both_texts_together(tmp_path: Path, prefix: str) -> None:
    """The library's own offsets decide where the continuation starts."""
    model = bpe(tmp_path, prefix)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    for context, continuation in TEXTS:
        encoding = model.encode(context + continuation)
        border = len(context.rstrip())
        own = [i for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True) if end > border]
        start = [model.token_to_id(prefix or "<|endoftext|>")] if prefix or not context.strip() else []
        text_ids = encoding.ids[1:] if prefix else encoding.ids
        assert encode_request(context, continuation, tokenizer) == ([*start, *text_ids], len(own))


def test_end_that_a_tokenizer_appends_is_not_scored(tmp_path: Path) -> None:
    from tokenizers import processors

    model = bpe(tmp_path, "")
    ids = model.encode("a b c").ids
    model.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert tokenizer.encode("a b c") == [*ids, 0]
    tokens, count = encode_request("a b", " c", tokenizer)
    assert tokens == ids and count == len(ids) - len(model.encode("a b").ids) + 1


def test_lengths_and_ties_and_losses_that_are_not_finite() -> None:
    """A length in the file replaces that of the text; of equal answers the first counts; of NaN none is right."""

    def request(question: int, is_gold: bool, num_bytes: int, task: str = "a") -> Request:
        return Request(1, task, question, "", "abcd", is_gold, num_bytes)

    requests = [request(0, False, 4), request(0, True, 8), request(1, True, 4), request(1, False, 4)]
    requests += [request(2, True, 1, "b"), request(2, False, 1, "b")]
    scores = score_tasks(requests, np.array([2.0, 3.0, 1.0, 1.0, 1.0, math.nan]))
    assert scores["a"].values == {"acc": 0.5, "acc_norm": 1.0, "bpb": pytest.approx(4 / 8 / math.log(2))}
    assert scores["b"].values == {"acc": 0.0, "acc_norm": 0.0, "bpb": pytest.approx(1 / 4 / math.log(2))}


# ---- runs

RUN = [*SMALL_RUN, "--tokenizer-type", "NullTokenizer", "--train-iters", "6", "--hidden-dropout", "0.1"]


def test_scores_are_logged_and_training_is_the_same(
    requests_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations without validation sets score requests, too."""
    scored = ["--eval-requests", str(requests_file), "--eval-interval", "2", "--tensorboard-dir", str(tmp_path / "tb")]
    for name, flags in (("with", scored), ("without", [])):
        argv = [*RUN, *flags, "--eval-iters", "0", "--run-dir", str(tmp_path / name)]
        argv += ["--save", str(tmp_path / name / "save")]
        assert pretrain(config_from(argv)) == 0
    assert load_losses(tmp_path / "with") == load_losses(tmp_path / "without")
    one, two = (json.loads((tmp_path / n / "save/iter_0000006/manifest.json").read_text()) for n in ("with", "without"))
    assert one["files"] == two["files"]  # hashes of weights and optimizer
    rows = [row for row in load_json_lines(tmp_path / "with/metrics.jsonl") if any(k.startswith("eval/") for k in row)]
    keys = {f"eval/{task}/{name}" for task in ("choice", "other.task-2") for name in ("acc", "acc_norm", "bpb")}
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row.keys() == {"step", "tokens", *keys, "eval/single/bpb"} for row in rows)
    assert len({row["eval/choice/bpb"] for row in rows}) == 3
    written = events(tmp_path / "tb")
    for key in keys:
        assert [e.value for e in written.Scalars(key)] == pytest.approx([row[key] for row in rows], rel=1e-6)
    output = capsys.readouterr().out
    assert f"note: eval_requests={requests_file}: 18 questions of 3 tasks, 51 requests; 8 contexts" in output
    line = "  step     6  choice acc {eval/choice/acc:.4f}  acc_norm {eval/choice/acc_norm:.4f}  bits per byte "
    assert line.format(**rows[-1]) + f"{rows[-1]['eval/choice/bpb']:.4f}" in output
    assert f"step     4  single bits per byte {rows[1]['eval/single/bpb']:.4f}" in output
    assert re.search(r"scores of choice +acc .* at step 6", output)


def test_signal_interrupts_requests_and_resume_is_equal(requests_file: Path, tmp_path: Path) -> None:
    """Signal a single rank while requests are scored."""

    def run(name: str, fault: str = "") -> Any:
        run_dir = tmp_path / name
        flags = ["--nproc", "2", "--eval-requests", requests_file, "--eval-interval", "3", "--eval-iters", "0"]
        flags += ["--eval-global-batch-size", "4", "--save", run_dir, "--load", run_dir, "--run-dir", run_dir]
        return run_pretrain(*RUN, *flags, fault=fault)

    stopped = run("stopped", fault="eval.begin:1:3:term")
    text = stopped.stdout + stopped.stderr
    assert stopped.returncode == 75 and load_status(tmp_path / "stopped")["step"] == 3, text
    assert re.search(r"stopping \(.*\): the requests of step 3 end after \d+ of \d+ batches, without scores", text), (
        text
    )
    assert "eval/" not in (tmp_path / "stopped/metrics.jsonl").read_text()
    last = run("stopped", fault="eval.begin:0:6:term")  # all steps are trained, only the scores are left
    assert last.returncode == 75 and "eval/" not in (tmp_path / "stopped/metrics.jsonl").read_text()
    assert run("stopped").returncode == 0 == run("straight").returncode
    assert load_losses(tmp_path / "stopped") == load_losses(tmp_path / "straight")
    key = "eval/choice/bpb"
    scores = load_losses(tmp_path / "straight", key)
    assert list(scores) == [3, 6] and load_losses(tmp_path / "stopped", key) == {6: scores[6]}


def test_loaded_weights_are_scored_without_training(requests_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*RUN, "--eval-iters", "0", "--eval-requests", str(requests_file), "--log-style", "megatron"]
    assert pretrain(config_from([*flags, "--save", str(run_dir), "--run-dir", str(run_dir)])) == 0
    other_dir = tmp_path / "other"
    assert pretrain(config_from([*flags, "--load", str(run_dir), "--skip-train", "--run-dir", str(other_dir)])) == 0
    key = "eval/choice/bpb"
    assert load_losses(other_dir, key) == load_losses(run_dir, key) and load_losses(run_dir, key)
