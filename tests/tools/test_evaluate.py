"""tools/evaluate.py: results equal those of lm-evaluation-harness with transformers, on one process and on several.

The tasks are the test's own, on local files. Most tests need the package lm-eval.
"""

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hugging_face_cases import model_cache
from ranks import run_ranks

from megalite.common.exits import run_cli
from megalite.data.datasets.requests import open_requests, read_requests
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.generate.generation import Completion, Sampling, generate_tokens, load_model
from megalite.generate.model_ranks import ModelRanks
from megalite.generate.scoring import Continuation, Score, score_continuations
from megalite.parallel.mesh import Mesh, build_mesh
from tools import convert_checkpoint, evaluate

ROOT = Path(__file__).resolve().parents[2]
HAS_HARNESS = all(importlib.util.find_spec(name) for name in ("lm_eval", "accelerate"))
WITH_HARNESS = pytest.mark.skipif(
    not HAS_HARNESS, reason="it compares with lm-eval's own Hugging Face model: pip install 'lm-eval[hf]'"
)
GUARDS = ("tools/evaluate.py", "tools/evaluation", "megalite/generate")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function from a family to (model of transformers, its directory with a tokenizer that is used as it is)."""
    get = model_cache(tmp_path_factory.mktemp("hf"), with_tokenizer=True)

    def model(name: str) -> tuple[Any, Path]:
        reference, directory = get(name)
        settings = {"eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return reference, directory

    return model


# ---- ranks that work for rank 0

TEXTS = [Continuation([5, 17, 60, 8], 2), Continuation([40, 41, 42], 1), Continuation([3, 9], 1)]


def work(model_dir: str, tp: int, pp: int) -> tuple[list[Score], list[Completion]] | None:
    """Return what rank 0 gets; the other ranks only know the model."""
    mesh = build_mesh(tp=tp, pp=pp, device=torch.device("cpu"))
    ranks = ModelRanks(load_model(model_dir, mesh))
    if not mesh.world.is_first:
        ranks.serve()
        return None
    scores = ranks.score(TEXTS, 2)
    completions = ranks.generate([[5, 17], [3]], 9, Sampling(1.1, 40, 0.9, seed=5), first=3, stop_texts=["w7"])
    ranks.close()
    return scores, completions


def test_other_ranks_compute_what_rank_0_asks_for(models) -> None:
    _, model_dir = models("llama")
    model = load_model(model_dir, Mesh.single_process())
    first, *others = run_ranks(4, work, str(model_dir), 2, 2)
    assert others == [None] * 3
    scores, completions = first
    expected = score_continuations(model, TEXTS, 2)
    assert [score.log_likelihood for score in scores] == pytest.approx([s.log_likelihood for s in expected], rel=1e-5)
    assert completions == generate_tokens(model, [[5, 17], [3]], 9, Sampling(1.1, 40, 0.9, 5), 3, ["w7"])


def test_text_ends_with_the_first_stop_text(models) -> None:
    model = load_model(models("llama")[1], Mesh.single_process())
    prompts = [[5, 17, 60], [40, 41]]
    full = generate_tokens(model, prompts, 9, Sampling())
    pieces = [model.tokenizer.decode([token]) for token in full[0].ids[3:]]
    stopped = generate_tokens(model, prompts, 9, Sampling(), 0, ["no such text", pieces[4]])
    end = 3 + pieces.index(pieces[4]) + 1
    assert stopped[0].ids == full[0].ids[:end] and stopped[0].finish_reason == "stop"
    assert stopped[1] == full[1] or stopped[1].finish_reason == "stop"


# ---- the command line


def run_tool(*args: object) -> int:
    """Run the program in this process and return its exit code."""
    return run_cli(lambda: evaluate.main([str(arg) for arg in args]))


def test_missing_package_is_named_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    for flags in (["--load", tmp_path], ["--write-requests", tmp_path / "x.jsonl"]):
        assert run_tool(*flags, "--tasks", "arc_easy") == 3
        error = capsys.readouterr().err
        assert error.endswith("megalite eval needs the package lm-eval; pip install lm-eval (or megalite[eval])\n")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tasks a", "one of the arguments --load --write-requests is required"),
        ("--load x --write-requests y --tasks a", "not allowed with argument --load"),
        ("--load x", "the following arguments are required: --tasks"),
        ("--load x --tasks a,,b", "'a,,b' is not a list of names as in hellaswag,arc_easy"),
        ("--load x --tasks a --limit 0", "'0' is not a number above 0"),
        ("--load x --tasks a --num-fewshot -1", "-1 is not in [0, inf)"),
        ("--load x --tasks a --include-path none", "--include-path none is not a directory; give one"),
        ("--load x --tasks a --output none/r.json", "output=none/r.json cannot be written: none is not a directory"),
        ("--write-requests none/r --tasks a", "write_requests=none/r cannot be written: none is not a directory"),
        ("--write-requests r --tasks a --output s", "--output is for the results of --load; leave it out"),
        ("--load x --tasks a --nproc 3 --tensor-model-parallel-size 2", "3 processes for tp 2 x pp 1 = 2"),
    ],
)
def test_wrong_flags_are_refused(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_tool(*flags.split()) == 2
    assert message in capsys.readouterr().err


# ---- lm-evaluation-harness

WORDS = ["the", "in", "of", "was", ".", *(f"w{i}" for i in range(40))]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
    train: {data}
test_split: test
fewshot_split: train
output_type: {output_type}
doc_to_text: "{{{{context}}}}"
"""
TASKS = {
    "own_choice": (
        "multiple_choice",
        'doc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n  - metric: acc_bytes\n",
    ),
    "own_last_word": (
        "loglikelihood",
        'doc_to_target: " {{choices[gold]}}"\nmetric_list:\n  - metric: acc\n  - metric: perplexity\n',
    ),
    "own_text": (
        "loglikelihood_rolling",
        'doc_to_target: "{{text}}"\n'
        "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n",
    ),
    "own_answer": (
        "generate_until",
        'doc_to_target: "{{answer}}"\n'
        'generation_kwargs:\n  until:\n    - "w7"\n  max_gen_toks: 6\n  do_sample: false\n'
        "metric_list:\n  - metric: exact_match\n",
    ),
}


def random_words(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(low, high)))


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of tasks; some contexts are empty, and some texts are longer than the model's positions."""
    directory, rng = tmp_path_factory.mktemp("tasks"), random.Random(2)
    data = directory / "questions.jsonl"
    with data.open("w") as file:
        for number in range(12):
            row = {
                "context": "" if number == 3 else random_words(rng, *((60, 70) if number == 5 else (2, 12))),
                "choices": [random_words(rng, 1, 4) for _ in range(3)],
                "gold": rng.randrange(3),
                "text": random_words(rng, 5, 120),
                "answer": random_words(rng, 1, 4),
            }
            file.write(json.dumps(row) + "\n")
    for name, (output_type, rest) in TASKS.items():
        text = TASK.format(name=name, data=data, output_type=output_type) + rest
        if name == "own_text":
            text = text.replace('"{{context}}"', '""')
        if name == "own_answer":
            text = text.replace("{{context}}", "the {{context}}")  # transformers cannot start from nothing
        (directory / f"{name}.yaml").write_text(text)
    return directory


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep data sets in a directory of the test, and fetch nothing."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    yield


def harness_results(model_dir: Path, task_dir: Path, **options: Any) -> dict[str, Any]:
    """Return the results of lm-evaluation-harness with transformers, on the CPU in fp32."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    simple_evaluate: Any = lm_eval.simple_evaluate
    model = HFLM(pretrained=str(model_dir), device="cpu", dtype="float32", batch_size=1)
    results = simple_evaluate(
        model, tasks=[*TASKS], task_manager=TaskManager(include_path=str(task_dir)), log_samples=False, **options
    )
    return results["results"]


def numbers(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the numbers of results by task and metric."""
    return {
        (task, metric): float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float)
    }


@WITH_HARNESS
@pytest.mark.nightly(guards=GUARDS)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_results_equal_the_harness_with_transformers(
    models, name: str, task_dir: Path, tmp_path: Path, offline
) -> None:
    """A checkpoint of megalite is evaluated on one process and on four, and its source by transformers."""
    _, model_dir = models(name)
    assert convert_checkpoint.main(["--from-hf", str(model_dir), "--save", str(tmp_path / "run")]) == 0
    expected = numbers(harness_results(model_dir, task_dir))
    assert len(expected) > 9 and expected["own_text", "bits_per_byte,none"] > 1
    common = ["--tasks", ",".join(TASKS), "--include-path", task_dir, "--batch-size", "5", "--device", "cpu"]
    layouts: dict[str, list[str]] = {
        "one": ["--load", str(tmp_path / "run")],
        "four": ["--load", str(tmp_path / "run"), "--nproc", "4", *"--tensor-model-parallel-size 2".split()],
    }
    layouts["four"] += ["--pipeline-model-parallel-size", "2"]
    for layout, flags in layouts.items():
        output = tmp_path / f"{layout}.json"
        argv = ["tools/evaluate.py", *map(str, common), *flags, "--output", str(output)]
        done = programs.run_python(*argv, timeout=300)
        assert done.returncode == 0, done.stderr
        content = json.loads(output.read_text())
        assert numbers(content["results"]) == pytest.approx(expected, rel=1e-5), layout
        assert content["n-samples"]["own_choice"] == {"original": 12, "effective": 12}
        assert content["model"]["load"] == flags[1] and "|own_choice" in done.stdout


@WITH_HARNESS
@pytest.mark.nightly(guards=GUARDS)
@pytest.mark.timeout(600)
def test_generated_texts_equal_the_harness_with_transformers(models, offline) -> None:
    """Contexts are longer than the positions leave room for; texts end at a stop text, or after the last token."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from tools.evaluation.harness_model import HarnessModel

    _, model_dir = models("llama")
    rng = random.Random(8)
    options = [
        {"until": ["w7", "the w1"], "max_gen_toks": 9},
        {"until": ["w3"], "max_gen_toks": 14, "do_sample": False},
    ]
    requests = [
        Instance("generate_until", {}, (f"the {random_words(rng, 1, 60)}", options[number % 2]), number, repeats=1)
        for number in range(10)
    ]
    expected = HFLM(pretrained=str(model_dir), device="cpu", dtype="float32", batch_size=1).generate_until(requests)
    model = HarnessModel(ModelRanks(load_model(model_dir, Mesh.single_process())), batch_size=3)
    assert model.generate_until(requests) == expected
    assert len(set(expected)) > 5 and min(map(len, expected)) < max(map(len, expected))


@WITH_HARNESS
@pytest.mark.nightly(guards=GUARDS)
@pytest.mark.timeout(600)
def test_limit_and_examples_in_contexts(models, task_dir: Path, tmp_path: Path, offline) -> None:
    _, model_dir = models("llama")
    expected = numbers(harness_results(model_dir, task_dir, limit=7, num_fewshot=2))
    output = tmp_path / "results.json"
    flags = ["--limit", "7", "--num-fewshot", "2", "--output", output, "--device", "cpu"]
    assert run_tool("--load", model_dir, "--tasks", ",".join(TASKS), "--include-path", task_dir, *flags) == 0
    content = json.loads(output.read_text())
    assert numbers(content["results"]) == pytest.approx(expected, rel=1e-5)
    assert content["n-shot"]["own_choice"] == 2 and content["n-samples"]["own_choice"]["effective"] == 7


@WITH_HARNESS
@pytest.mark.nightly(guards=GUARDS)
@pytest.mark.timeout(600)
def test_written_requests_have_the_scores_of_the_harness(
    models, task_dir: Path, tmp_path: Path, offline, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores of requests in a run's way, from the losses of single texts, equal those of the task."""
    import numpy as np

    from megalite.data.datasets.requests import score_tasks

    _, model_dir = models("llama")
    path = tmp_path / "requests.jsonl"
    argv = ["--write-requests", path, "--tasks", "own_choice,own_last_word", "--include-path", task_dir]
    assert run_tool(*argv) == 0
    assert f"wrote 24 questions to {path}; train with --eval-requests {path}" in capsys.readouterr().out
    requests = read_requests(str(path))
    assert len(requests) == 12 * 3 + 12 and sum(request.is_gold for request in requests) == 24
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(model_dir))
    model = load_model(model_dir, Mesh.single_process())
    encoded = open_requests(str(path), tokenizer, model.model_config.max_positions)
    assert encoded.num_cut > 0
    texts = [Continuation(*pair) for pair in zip(encoded.tokens, encoded.num_labels, strict=True)]
    losses = np.array([-score.log_likelihood for score in score_continuations(model, texts, 8)])
    scores = score_tasks(requests, losses)
    expected = numbers(harness_results(model_dir, task_dir))
    assert scores["own_choice"].acc == pytest.approx(expected["own_choice", "acc,none"])
    assert scores["own_choice"].acc_norm == pytest.approx(expected["own_choice", "acc_bytes,none"])
    assert scores["own_last_word"].acc is None
    own = [loss for loss, request in zip(losses, requests, strict=True) if request.task == "own_last_word"]
    assert np.exp(np.mean(own)) == pytest.approx(expected["own_last_word", "perplexity,none"], rel=1e-5)


@WITH_HARNESS
@pytest.mark.nightly(guards=GUARDS)
@pytest.mark.timeout(600)
def test_tasks_that_cannot_be_used_are_named(
    models, task_dir: Path, tmp_path: Path, offline, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model_dir = models("llama")
    where = ["--include-path", task_dir]
    assert run_tool("--load", model_dir, "--tasks", "own_choice,no_such_task", *where) == 2
    assert "evaluate.py: tasks=no_such_task is not a task of lm-evaluation-harness; " in capsys.readouterr().err
    assert run_tool("--load", model_dir, "--tasks", "arc_easy") == 3
    error = capsys.readouterr().err
    assert "evaluate.py: tasks=arc_easy cannot be loaded (" in error and "give --download to fetch them once" in error
    path = tmp_path / "requests.jsonl"
    assert run_tool("--write-requests", path, "--tasks", "own_text", *where) == 3
    assert "task own_text has no answers to choose from (loglikelihood_rolling)" in capsys.readouterr().err
    assert not path.exists()
    many = (task_dir / "own_answer.yaml").read_text().replace("max_gen_toks: 6", "max_gen_toks: 60")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/many.yaml").write_text(many.replace("own_answer", "own_long"))
    assert run_tool("--load", model_dir, "--tasks", "own_long", "--include-path", tmp_path / "tasks") == 3
    assert "a task generates 60 tokens, the model has 48 positions; leave it out" in capsys.readouterr().err
    for flags in ([], ["--nproc", "2", "--tensor-model-parallel-size", "2"]):
        argv = ["tools/evaluate.py", "--load", str(model_dir), "--tasks", "no_such_task", "--device", "cpu", *flags]
        done = programs.run_python(*argv, timeout=300)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("evaluate.py: tasks=no_such_task") == 1
