"""Generated text: greedy text equals transformers' for every family and under every layout; random sampling."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hugging_face_cases import MODELS, SEQ_LENGTH, VOCAB_SIZE, model_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import nightly_except
from ranks import run_ranks
from train_cases import SMALL_RUN, config_from

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.manager import saver
from megalite.generate.generation import (
    KVCache,
    Sampling,
    generate_tokens,
    last_token_logits,
    load_model,
    sample,
    sampling_probs,
    uniform_at,
)
from megalite.interop.huggingface.model_files import stop_ids
from megalite.kernels.attention import attention
from megalite.kernels.cached_attention import cached_attention
from megalite.models.gpt import Stage
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.parallel.mesh import Mesh, build_mesh
from megalite.planning.run_plan import make_run_plan
from megalite.training.setup import SetupError
from tools import convert_checkpoint
from tools.generate import format_completion

ROOT = Path(__file__).resolve().parents[2]
GREEDY = Sampling()
PROMPTS = [[5, 17, 60], [11], [40, 41, 42, 43, 44, 3, 9], [7, 90, 8, 6]]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function from a family to (model of transformers, its directory, which also has a tokenizer)."""
    return model_cache(tmp_path_factory.mktemp("hf"), with_tokenizer=True)


def transformers_text(model: Any, prompt: list[int], max_new: int, stops: list[int] | int = 2) -> list[int]:
    ids = torch.tensor([prompt])
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new, pad_token_id=0)
    with torch.no_grad():
        return model.generate(ids, eos_token_id=stops, **options)[0].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_equals_transformers(models, name: str) -> None:
    reference, model_dir = models(name)
    texts = generate_tokens(load_model(model_dir, Mesh.single_process()), PROMPTS, NEW_TOKENS, GREEDY)
    assert [text.ids for text in texts] == [transformers_text(reference, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert [text.prompt_length for text in texts] == [len(prompt) for prompt in PROMPTS]
    assert len({tuple(text.ids[text.prompt_length :]) for text in texts}) > 1


def test_generation_stops_at_end_of_document(models, tmp_path: Path) -> None:
    reference, model_dir = models("llama")
    model = load_model(model_dir, Mesh.single_process())
    plain = [text.ids for text in generate_tokens(model, PROMPTS, NEW_TOKENS, GREEDY)]
    stops = [plain[0][5], plain[2][9]]  # ids in the generated text
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    model = load_model(tmp_path, Mesh.single_process())
    assert model.stop_ids == {2, *stops}
    texts = generate_tokens(model, PROMPTS, NEW_TOKENS, GREEDY)
    assert [text.ids for text in texts] == [
        transformers_text(reference, prompt, NEW_TOKENS, [2, *stops]) for prompt in PROMPTS
    ]
    assert texts[0].finish_reason == "eod" and len(texts[0].ids) <= 6
    assert {text.finish_reason == "eod" for text in texts} == {text.ids[-1] in model.stop_ids for text in texts}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "2"}))
    with pytest.raises(CheckpointError, match="eos_token_id='2' is neither a token id"):
        stop_ids(tmp_path)


def test_generation_stops_at_the_last_position(models) -> None:
    reference, model_dir = models("gpt2")
    model = load_model(model_dir, Mesh.single_process())
    long_prompt = [1 + i % 90 for i in range(SEQ_LENGTH - 3)]
    (filled, short_text) = generate_tokens(model, [long_prompt, [5]], 10, GREEDY)
    assert len(filled.ids) == SEQ_LENGTH and filled.finish_reason == "length" and len(short_text.ids) <= 11
    with torch.no_grad():  # the last token comes from the last position but one
        assert filled.ids[-1] == int(reference(torch.tensor([filled.ids[:-1]])).logits[0, -1].argmax())
    for prompt in ([], [1] * SEQ_LENGTH):
        with pytest.raises(SetupError, match=f"prompt 0 has {len(prompt)} tokens, the model 48 positions"):
            generate_tokens(model, [prompt], 1, GREEDY)


# ---- layouts
RANDOM = Sampling(temperature=1.3, top_k=60, top_p=0.95, seed=7)


def _generate_ids(model_dir: str, tp: int, pp: int) -> list[list[list[int]]]:
    model = load_model(model_dir, build_mesh(tp=tp, pp=pp, device=torch.device("cpu")))
    return [[t.ids for t in generate_tokens(model, PROMPTS, NEW_TOKENS, sampling)] for sampling in (GREEDY, RANDOM)]


LAYOUTS = [(2, 2), (2, 1), (1, 2), (4, 1)]
# qwen2 has one group of heads
CASES = [(name, *layout) for name in ("llama", "gpt2", "qwen2", "gpt_neox") for layout in LAYOUTS]
CASES += [("qwen2 window", 2, 2)]
OFTEN = [case for case in CASES if case[1:] == (2, 2) or case[0] == "llama"]


@pytest.mark.parametrize("case", nightly_except(CASES, OFTEN, str, guards=("megalite/generate",)))
def test_generation_is_equal_on_all_ranks_and_layouts(models, case: tuple[str, int, int]) -> None:
    name, tp, pp = case
    _, model_dir = models(name)
    expected = _generate_ids(str(model_dir), 1, 1)
    assert expected[0] != expected[1]
    for texts in run_ranks(tp * pp, _generate_ids, str(model_dir), tp, pp):
        assert texts == expected


def test_generation_refuses_an_impossible_layout(models) -> None:
    with pytest.raises(AssertionError, match="SetupError: tensor_model_parallel_size=3 does not divide num_attention"):
        run_ranks(3, _generate_ids, str(models("llama")[1]), 3, 1)


def test_generation_from_a_checkpoint_equals_its_hugging_face_source(models, tmp_path: Path) -> None:
    _, model_dir = models("qwen3")
    assert convert_checkpoint.main(["--from-hf", str(model_dir), "--save", str(tmp_path)]) == 0
    assert _generate_ids(str(tmp_path), 1, 1) == _generate_ids(str(model_dir), 1, 1)


# ---- the cache
@settings(max_examples=40)
@given(
    *(st.tuples(*map(st.integers, (1, 1, 2), (3, 2, 9))), st.sampled_from([1, 3])),
    *(st.none() | st.integers(1, 10), st.none() | st.sampled_from([0.4, 100.0]), st.data()),
)
def test_cached_attention_equals_attention(
    sizes: tuple, repeat: int, window: int | None, softcap: float | None, data: st.DataObject
) -> None:
    """Query a few positions of each sample. Keys behind them, or before the window, do not matter."""
    B, G, T = sizes
    torch.manual_seed(0)
    q = torch.randn(T, B, G * repeat, 4, dtype=torch.float64)
    k, v = torch.randn(2, T, B, G, 4, dtype=torch.float64)
    options: dict[str, Any] = dict(scale=0.3, window=window, softcap=softcap)
    expected = attention(q, k, v, **options)
    S_new = data.draw(st.integers(1, T))
    starts = [data.draw(st.integers(0, T - S_new)) for _ in range(B)]
    positions = torch.tensor(starts) + torch.arange(S_new).unsqueeze(1)
    samples = torch.arange(B)
    for b, start in enumerate(starts):
        k[start + S_new :, b] = v[start + S_new :, b] = 1e6
        if window is not None:
            window_start = max(0, start - window + 1)
            k[:window_start, b] = v[:window_start, b] = 1e6
    actual = cached_attention(q[positions, samples], k, v, positions, **options)
    torch.testing.assert_close(actual, expected[positions, samples], rtol=1e-12, atol=1e-12)


def stage_of(flags: str) -> Stage:
    common_flags = f"""--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length {SEQ_LENGTH} --micro-batch-size 1 --lr 1
     --train-iters 1 --mock-data --vocab-size {VOCAB_SIZE} --init-method-std 0.3"""
    config = config_from(f"{common_flags} {flags}")
    return make_run_plan(config, 1, VOCAB_SIZE).balance.build_stages(Mesh.single_process(), torch.float64)[0].eval()


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama yarn", "llama linear", "gpt2", "qwen2 window", "gemma2", "gemma3_text"),
        "--position-embedding-type rope --rotary-interleaved --rotary-percent 0.5 --no-rope-freq 2 --softmax-type learnable",
        "--position-embedding-type yarn --rotary-scaling-factor 4 --no-rope-freq [1,0,0] --window-size 5,0",
        "--attn-logit-softcapping 0.5 --final-logit-softcapping 2 --window-size 5,0 --window-attn-skip-freq 2",
        "--position-embedding-type rope --hybrid-layer-pattern **-E --num-experts 4 --window-size 5,0",
        "--plugin examples/plugins/mixer.py --position-embedding-type rope --hybrid-layer-pattern S-*-S-",
    ],
)
def test_cached_logits_equal_full_logits(models, name: str) -> None:
    if name.startswith("--"):
        stage = stage_of(name)
    else:
        stage = load_model(models(name)[1], Mesh.single_process(), torch.float64).stage
    tokens_SB = torch.randint(0, VOCAB_SIZE, (20, 3), generator=torch.Generator().manual_seed(3))
    zero = torch.zeros(3, dtype=torch.int64)
    with torch.no_grad():
        expected = stage(None, Batch(tokens_SB, None, None, zero), ForwardContext())
        cache, actual, starts = KVCache(24), [], torch.tensor([3, 9, 5])
        for i in range(11):
            positions = torch.arange(12)[:, None].expand(-1, 3) if i == 0 else (starts + i)[None]
            cache.set_positions(positions, positions.device)
            last_tokens = starts if i == 0 else zero
            new_tokens_SB = tokens_SB[positions, torch.arange(3)]
            x = stage.forward_hidden(
                None, Batch(new_tokens_SB, None, None, zero, positions), ForwardContext(cache=cache)
            )
            actual.append(last_token_logits(stage.head, stage.final_norm(x), last_tokens))
        assert torch.equal(
            stage(None, Batch(tokens_SB, None, None, zero), ForwardContext()), expected
        )  # no cache is left installed
    for i, logits_BV in enumerate(actual):
        torch.testing.assert_close(logits_BV, expected[starts + i, torch.arange(3)], rtol=1e-9, atol=1e-9)


# ---- sampling
@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 30), st.floats(0.1, 3.0), st.integers(0, 40), st.floats(0.05, 1.0))
def test_sampling_filter_equals_transformers(
    seed: int, size: int, temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p, order = sampling_probs(logits, Sampling(temperature, top_k, top_p))
    ids: Any = None
    expected = TemperatureLogitsWarper(temperature)(ids, logits)
    expected = TopKLogitsWarper(min(top_k, size))(ids, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(ids, expected) if top_p < 1 else expected
    torch.testing.assert_close(torch.zeros_like(p).scatter(-1, order, p), expected.softmax(-1), rtol=1e-9, atol=1e-12)
    drawn = sample(logits, Sampling(temperature, top_k, top_p, seed), [(0, 1), (1, 1)])
    assert (expected.gather(-1, drawn[:, None]) > float("-inf")).all()


def test_sampling_follows_the_distribution_and_coordinates() -> None:
    p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    n = 20_000
    coordinates = [(i % 40, i // 40) for i in range(n)]
    counts = torch.bincount(sample(p.log().expand(n, -1), Sampling(1.0, seed=3), coordinates), minlength=5)
    chi2 = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi2 < 18.5  # 4 degrees of freedom: 99.9 % of samples pass
    drawn = torch.tensor([[uniform_at(3, prompt, position) for position in range(200)] for prompt in range(100)])
    rows = torch.corrcoef(drawn)[~torch.eye(100, dtype=torch.bool)]
    assert rows.abs().max() < 5.5 / math.sqrt(200)  # prompts are independent
    assert abs(float((drawn[:, 1:] * drawn[:, :-1]).mean()) - 0.25) < 0.01
    assert len({uniform_at(seed, 0, 0) for seed in range(1000)}) > 995


def test_sampling_is_independent_of_the_batch(models) -> None:
    model = load_model(models("llama")[1], Mesh.single_process())
    batched = generate_tokens(model, PROMPTS, NEW_TOKENS, RANDOM)
    for number, prompt in enumerate(PROMPTS):
        assert generate_tokens(model, [prompt], NEW_TOKENS, RANDOM, number)[0].ids == batched[number].ids
    assert generate_tokens(model, [PROMPTS[0]], NEW_TOKENS, RANDOM, 9)[0].ids != batched[0].ids  # another prompt number


# ---- the tool
def tool(*flags: str, ok: bool = True) -> str:
    result = programs.run_python("tools/generate.py", *flags)
    assert (result.returncode == 0) == ok and "Traceback" not in result.stderr, result.stdout + result.stderr
    return result.stdout if ok else result.stderr


def test_generate_command_on_one_and_four_processes(models, tmp_path: Path) -> None:
    reference, model_dir = models("llama")
    (tmp_path / "some.jsonl").write_text('"w20 of the"\n{"text": "in w33 . was"}\n')
    flags = ["--load", str(model_dir), "--prompt", "the w10", "--prompts-file", str(tmp_path / "some.jsonl")]
    flags += ["--max-new-tokens", "5", "--temperature", "0", "--batch-size", "2", "--device", "cpu"]
    rows = [json.loads(line) for line in tool(*flags, "--json").splitlines()]
    assert [row["prompt"] for row in rows] == ["the w10", "w20 of the", "in w33 . was"]
    assert rows[0]["ids"][:2] == [3, 18] and [row["number"] for row in rows] == [0, 1, 2]
    for row in rows:
        prompt_length = len(row["ids"]) - len(row["new_ids"])
        assert row["ids"] == transformers_text(reference, row["ids"][:prompt_length], 5) and row["step"] == 0
        assert row["stop"] == ("eod" if row["ids"][-1] == 2 else "length") and row["text"]
    layout_flags = ["--nproc", "4", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    assert [json.loads(line) for line in tool(*flags, "--json", *layout_flags).splitlines()] == rows
    plain = tool(*flags).splitlines()
    assert [line.startswith("[step 0] ") for line in plain] == [True] * 3 and rows[1]["text"] in plain[1]


def test_generate_command_after_context_parallel_training(tmp_path: Path) -> None:
    outputs = []
    for cp in ("1", "2"):
        flags = f"--tokenizer-type NullTokenizer --device cpu --train-iters 2 --nproc {cp} --context-parallel-size {cp}"
        result = programs.run_python("pretrain_gpt.py", *SMALL_RUN, *flags.split(), "--save", str(tmp_path / cp))
        assert result.returncode == 0, result.stderr
        generate_flags = ["--prompt", "5 17 60", "--max-new-tokens", "5", "--temperature", "0", "--device", "cpu"]
        outputs.append(tool("--load", str(tmp_path / cp), *generate_flags))
    assert outputs[0] == outputs[1] and "5 17 60" in outputs[0]


def test_generated_text_is_escaped_on_a_terminal() -> None:
    text = "\x1b[2J\u202ethe\n\tw10"
    assert format_completion({"step": 7}, text, as_json=False) == "[step 7] \\x1b[2J\\u202ethe\n\tw10"
    assert json.loads(format_completion({"step": 7, "text": text}, text, as_json=True))["text"] == text


def test_bad_prompts_and_models_are_one_line(models, tmp_path: Path) -> None:
    _, model_dir = models("gpt2")
    (tmp_path / "a.jsonl").write_text('"x"\n7\n')
    flags = ["--load", str(model_dir), "--prompts-file", str(tmp_path / "a.jsonl")]
    assert "line 2: neither a string nor an object" in tool(*flags, ok=False)
    message = tool("--load", str(model_dir), "--prompt", " ".join(["the"] * SEQ_LENGTH), "--device", "cpu", ok=False)
    assert message == f"generate.py: prompt 0 has {SEQ_LENGTH} tokens, the model {SEQ_LENGTH} positions; shorten it\n"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    assert "has no tokenizer that fits" in tool("--load", str(tmp_path), ok=False)


def test_generation_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    toml = "num_layers = 2\nhidden_size = 32\nnum_attention_heads = 4\nseq_length = 48\nvocab_size = 93\n"
    saver.save(tmp_path, 1, [], {"config": toml}, Mesh.single_process())
    with pytest.raises(SetupError, match="was trained without a tokenizer"):
        load_model(tmp_path, Mesh.single_process())
