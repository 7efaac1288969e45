"""Hugging Face to megalite and back: logits as in transformers, tensors bit for bit, under any layout; hostile input."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from checkpoint_loads import full_shard
from hugging_face_cases import (
    CASES,
    GPT2,
    MODELS,
    SEQ_LENGTH,
    SHAPE,
    VOCAB_SIZE,
    causal_lm_class,
    copy_model,
    create_model,
    in_fp64,
    load_in_fp64,
    write_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_convert_megatron import tool
from token_files import full_disk
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.manager import saver
from megalite.checkpoint.offline import open_checkpoint
from megalite.config.config_file import dump_config, parse_config_text
from megalite.config.option_parsers import format_layer_pattern
from megalite.config.options import ModelConfig, build
from megalite.generate.generation import load_model
from megalite.interop.huggingface.config_json import choose_family, read_config, write_config
from megalite.interop.huggingface.model_files import open_model
from megalite.interop.name_mapping import FAMILIES
from megalite.interop.tensor_mapping import ExportSource, load_external_weights
from megalite.models.gpt import Stage
from megalite.models.specs import checkpoint_specs, model_specs
from megalite.nn.embedding import Embedding, vocab_spec
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, model_shards
from megalite.parallel.mesh import Mesh
from megalite.training.state import Progress
from tools import convert_checkpoint
from tools.export_files import write_initial_checkpoint
from tools.verification import conversion
from tools.verification.conversion import Verdict, compare

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 2e-5  # of logits of size 1 to 6 in fp32; measured 5e-6


def tokens_BS() -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(5))


def megalite_logits(directory: Path) -> Tensor:
    source = open_checkpoint(directory)
    return conversion.megalite_logits(source, convert_checkpoint.saved_model(source), tokens_BS(), VOCAB_SIZE)


@torch.no_grad()
def transformers_logits(model: Any) -> Tensor:
    return model(tokens_BS()).logits


def load_transformers(model_dir: Path) -> Any:
    model_type = json.loads((model_dir / "config.json").read_text())["model_type"]
    return causal_lm_class(model_type).from_pretrained(model_dir, attn_implementation="eager").eval()


def compare_files(model_dir: Path, checkpoint_dir: Path) -> Verdict:
    source = open_model(model_dir)
    return compare(source.tensors, ExportSource(open_checkpoint(checkpoint_dir)), model_specs(source.model, VOCAB_SIZE))


def read_tensors(model_dir: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in model_dir.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))


def saved_config(checkpoint_dir: Path) -> Any:
    return build(parse_config_text(open_checkpoint(checkpoint_dir).manifest.state["config"], ""))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_and_export_is_bit_exact(models, name: str, tmp_path: Path, capsys) -> None:
    hf_model, hf_dir = models(name)
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "ours", "--check") == 0
    expected = transformers_logits(hf_model)
    assert expected.abs().max() > 1
    torch.testing.assert_close(megalite_logits(tmp_path / "ours"), expected, rtol=0, atol=TOLERANCE)
    assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / "back", "--like", hf_dir, "--check") == 0
    out = capsys.readouterr().out
    assert out.count("all bits equal") == 2
    differences = re.findall(r"logits of 96 random tokens differ by at most (\S+) .* the same in 100.00%", out)
    assert len(differences) == 2 and max(map(float, differences)) < TOLERANCE
    assert_same_bits(read_tensors(tmp_path / "back"), read_tensors(hf_dir))
    exported_config = load_transformers(tmp_path / "back").config
    assert (exported_config.model_type, exported_config.bos_token_id, exported_config.eos_token_id) == (
        name.split()[0],
        1,
        2,
    )
    assert torch.equal(
        transformers_logits(load_transformers(tmp_path / "back")), transformers_logits(load_transformers(hf_dir))
    )


IN_FP64 = ["llama", "llama linear", "qwen3", "gemma2", "gemma2 of one cap", "gemma3_text", "gemma3_text untied"]
IN_FP64 += ["olmo2", "olmo_hybrid", "olmo_hybrid with rotary positions"]
IN_FP64 += ["qwen3_next", "qwen3_next of one key head", "qwen3_5_text", "qwen3_5_moe_text"]
IN_FP64 += ["mamba2", "mamba2 of one group", "nemotron_h", "nemotron_h of groups of experts"]


@pytest.mark.parametrize("name", IN_FP64)
def test_logits_equal_transformers_in_fp64(models, name: str) -> None:
    model_dir = models(name)[1]
    model = load_in_fp64(model_dir)
    with in_fp64():
        expected = transformers_logits(model)
    source = open_model(model_dir)
    make_param = ParamFactory(Mesh.single_process(), torch.float64, seed=0)
    layers, sizes = range(source.model.num_layers), dict(vocab_size=VOCAB_SIZE, padded_vocab_size=VOCAB_SIZE)
    stage = Stage(make_param, source.model, [layers], 0, **sizes).eval()
    shards = model_shards(stage, Mesh.single_process())
    load_external_weights(source.tensors, shards, checkpoint_specs(source.model, VOCAB_SIZE), "it", False)
    batch = Batch(tokens_BS().T, None, None, torch.zeros(2, dtype=torch.int64))
    with torch.no_grad():
        actual = stage(None, batch, ForwardContext())[..., :VOCAB_SIZE].transpose(0, 1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden_size", [1152, 2560, 3584])
def test_scaled_embedding_equals_transformers_bit_for_bit(hidden_size: int, dtype: torch.dtype) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    shape = dict(num_layers=1, hidden_size=hidden_size, num_attention_heads=1, seq_length=SEQ_LENGTH)
    model = ModelConfig(**shape, position_embedding_type="none", embedding_multiplier=hidden_size**0.5)
    make_param = ParamFactory(Mesh.single_process(), dtype, seed=0)
    spec = vocab_spec("embedding.word", VOCAB_SIZE, VOCAB_SIZE, hidden_size, 0.02, tied=False)
    embedding = Embedding(make_param, spec, model).eval()
    expected = Gemma3TextScaledWordEmbedding(VOCAB_SIZE, hidden_size, 0, hidden_size**0.5).to(dtype)
    expected.weight.data = embedding.word.data
    batch = Batch(tokens_BS().T, None, None, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(embedding(batch, ForwardContext()), expected(tokens_BS()).transpose(0, 1))


def test_half_precision_in_many_files(models, tmp_path: Path) -> None:
    hf_dir = tmp_path / "bf16"
    load_transformers(models("qwen3")[1]).to(torch.bfloat16).save_pretrained(hf_dir, max_shard_size="20KB")
    assert len(list(hf_dir.glob("*.safetensors"))) > 2
    hf_model = open_model(hf_dir)
    state = convert_checkpoint.start_state(hf_model.options, hf_model.dtype, {})
    write_initial_checkpoint(
        tmp_path / "ours", hf_model.tensors, model_specs(hf_model.model, VOCAB_SIZE), state, file_bytes=20_000
    )
    source = open_checkpoint(tmp_path / "ours")
    assert len(source.manifest.files) > 2
    assert saved_config(tmp_path / "ours").precision.bf16
    export_dir = tmp_path / "back"
    assert tool("--load", tmp_path / "ours", "--to-hf", export_dir, "--max-shard-size", "20kB", "--check") == 0
    assert max(path.stat().st_size for path in export_dir.glob("*.safetensors")) < 25_000
    assert len(json.loads((export_dir / "model.safetensors.index.json").read_text())["weight_map"]) == len(
        read_tensors(export_dir)
    )
    assert_same_bits(read_tensors(export_dir), read_tensors(hf_dir))
    float32_dir = tmp_path / "wide"
    assert tool("--load", tmp_path / "ours", "--to-hf", float32_dir, "--dtype", "float32", "--check") == 0
    assert all(torch.equal(t, read_tensors(hf_dir)[n].float()) for n, t in read_tensors(float32_dir).items())
    assert (
        load_transformers(float32_dir).dtype == torch.float32 and load_transformers(export_dir).dtype == torch.bfloat16
    )


def test_main_weights_and_offset_norms(tmp_path: Path) -> None:
    options = dict(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, apply_layernorm_1p=True)
    pieces = []
    for name, spec in model_specs(ModelConfig(**options), 7).items():
        main = torch.randn(spec.shape)
        pieces += [full_shard(main.bfloat16(), f"model/{name}"), full_shard(main, f"optimizer.main/{name}")]
    text = "\n".join(f"{key} = {str(value).lower()}" for key, value in {**options, "vocab_size": 7}.items())
    saver.save(tmp_path / "ours", 1, pieces, {"config": text}, Mesh.single_process())
    for dtype, kind in (("float32", "optimizer.main"), ("bfloat16", "model")):
        assert tool("--load", tmp_path / "ours", "--to-hf", tmp_path / dtype, "--dtype", dtype, "--check") == 0
        stored, exported = {p.name: p.data for p in pieces}, read_tensors(tmp_path / dtype)
        assert exported["transformer.wte.weight"].shape == (7, 8)
        assert torch.equal(exported["transformer.ln_f.weight"], stored[f"{kind}/final_norm.weight"] + 1)
        assert torch.equal(exported["transformer.ln_f.bias"], stored[f"{kind}/final_norm.bias"])


TP = ("--target-tensor-parallel-size",)


def with_llamas(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: options if name.startswith("gpt") else {**CASES["llama"], **options} for name, options in rows.items()
    }


FAMILY_OPTIONS, MEGATRONS = with_llamas(CASES["options"]), with_llamas(CASES["megatron"])


def save_run(directory: Path, options: dict[str, Any], one_plus: bool, bf16: bool = False) -> ModelConfig:
    """Save a model of these options with random weights and norms that are near 1 in use; return its configuration."""
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 12}
    values = {**shape, **options, "apply_layernorm_1p": one_plus, "vocab_size": 9}
    model, generator = build(values).model, torch.Generator().manual_seed(5)
    pieces = []
    for name, spec in model_specs(model, 9).items():
        data = 0.3 * torch.randn(spec.shape, generator=generator)
        data += 1 - one_plus if name.endswith("norm.weight") else 0
        pieces.append(full_shard(data.bfloat16() if bf16 else data, f"model/{name}"))
    state = {"config": dump_config(build(values)), "vocab_size": 9, "progress": Progress().to_json()}
    saver.save(directory, 1, pieces, state, Mesh.single_process())
    return model


@pytest.mark.parametrize("target", ["--to-hf", "--to-megatron"])
def test_failing_disk_is_one_line_and_leaves_nothing(target: str, tmp_path: Path, capsys) -> None:
    save_run(tmp_path / "ours", {**FAMILY_OPTIONS["gpt2"], "hidden_size": 64}, one_plus=False)
    capsys.readouterr()
    with full_disk():
        assert tool("--load", tmp_path / "ours", target, tmp_path / "out") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'out'}: cannot be written" in line and "File too large" in line
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("one_plus", [False, True], ids=["plain", "1p"])
@pytest.mark.parametrize("family", FAMILY_OPTIONS)
def test_offset_norms_equal_transformers(family: str, one_plus: bool, tmp_path: Path) -> None:
    model = save_run(tmp_path / "ours", FAMILY_OPTIONS[family], one_plus)
    argv = ["--load", tmp_path / "ours", "--to-hf", tmp_path / "hf", "--family", family, "--dtype", "float32"]
    assert tool(*argv, "--check") == 0  # compares the logits of transformers too
    used, stored = read_tensors(tmp_path / "hf"), open_checkpoint(tmp_path / "ours").manifest.tensors
    norms = [values for name, values in used.items() if re.search(r"(norm|ln_[12f])\.weight", name)]
    num_norms = 5 + 4 * model.qk_layernorm + 4 * model.sandwich_norm
    assert len(norms) == sum(name.endswith("norm.weight") for name in stored) == num_norms
    mean = 0 if FAMILIES.get(family).zero_centered_norms else 1
    assert all(abs(float(values.mean()) - mean) < 0.5 for values in norms)


def _by_name(source: ExportSource, name: str) -> float:
    """Return the offset by the former rule, which wrote q_norm and k_norm as 0.0005 instead of 1.0005."""
    return float(bool(source.offsets) and (name.endswith(".norm.weight") or name == "final_norm.weight"))


def _all_norms(source: ExportSource, name: str) -> float:
    return float(name.endswith("norm.weight"))


@pytest.mark.parametrize(
    "options,offset,flags",
    [
        (FAMILY_OPTIONS["qwen3"], _by_name, "--to-hf {} --dtype float32 --check"),
        (FAMILY_OPTIONS["qwen3"], _by_name, "--to-hf {} --dtype bfloat16 --check"),
        (MEGATRONS["gpt qk"], _all_norms, "--to-megatron {} --check-bits"),  # also stored minus one
    ],
)
def test_check_detects_a_wrong_norm_offset(options, offset, flags: str, tmp_path, monkeypatch, capsys) -> None:
    save_run(tmp_path / "ours", options, True)
    monkeypatch.setattr(ExportSource, "offset", offset)
    assert tool("--load", tmp_path / "ours", *flags.format(tmp_path / "there").split()) == 1
    out = capsys.readouterr().out
    assert "all bits equal" in out and re.search(
        "logits of .* differ by|read a second way, computes something else", out
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("one_plus", [False, True], ids=["plain", "1p"])
@pytest.mark.parametrize("kind", MEGATRONS)
def test_offset_norms_round_trip_through_megatron(kind: str, one_plus: bool, tp: int, tmp_path: Path) -> None:
    model, export_dir = save_run(tmp_path / "ours", MEGATRONS[kind], one_plus), tmp_path / "there"
    assert tool("--load", tmp_path / "ours", "--to-megatron", export_dir, *TP, tp, "--check") == 0
    assert tool("--from-megatron", export_dir, "--save", tmp_path / "again", "--check") == 0
    first, reimported = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "again")
    assert convert_checkpoint.saved_model(reimported).apply_layernorm_1p == one_plus
    for name in model_specs(model, 9):
        assert torch.equal(first.read(f"model/{name}"), reimported.read(f"model/{name}")), name


def test_tokenizer_is_converted_with_the_model(models, tmp_path: Path, capsys) -> None:
    hf_dir = copy_model(models("mistral")[1], tmp_path / "model")
    write_tokenizer(hf_dir, VOCAB_SIZE - 20)  # fewer tokens than rows, as in Qwen
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "ours", "--check") == 0
    assert re.search("logits of 27 positions of a text .* likeliest token the same in 100.00%", capsys.readouterr().out)
    data = saved_config(tmp_path / "ours").data
    assert (data.tokenizer_type, data.tokenizer_model) == ("HuggingFaceTokenizer", str(hf_dir))
    model = load_model(tmp_path / "ours", Mesh.single_process())  # as generate.py does
    assert (model.tokenizer.vocab_size, model.tokenizer.eod, model.step) == (VOCAB_SIZE - 20, 2, 0)
    assert model.stage.embedding is not None and model.stage.embedding.word.shape[0] == 128
    export_dir = tmp_path / "back"
    assert tool("--load", tmp_path / "ours", "--to-hf", export_dir, "--check") == 0
    assert_same_bits(read_tensors(export_dir), read_tensors(hf_dir))
    expected_files = {p.name for p in hf_dir.iterdir()} - {"modeling_evil.py"}
    assert {p.name for p in export_dir.iterdir()} == expected_files
    for name in expected_files - {"config.json", "model.safetensors"}:
        assert (export_dir / name).read_bytes() == (hf_dir / name).read_bytes()
    written = json.loads((export_dir / "config.json").read_text())
    assert (written["model_type"], written["vocab_size"], written["eos_token_id"]) == ("mistral", VOCAB_SIZE, 2)
    write_tokenizer(hf_dir, VOCAB_SIZE + 1)
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "more") == 0
    assert "94 tokens, but 93 rows" in capsys.readouterr().err
    assert saved_config(tmp_path / "more").data.tokenizer_type is None


GPU_PACKAGE = """from types import SimpleNamespace

def needs_a_gpu(*args, **kwargs):
    raise RuntimeError("0 active drivers")

names = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(**dict.fromkeys(names, needs_a_gpu)))
"""


def test_check_runs_on_a_cpu_beside_kernels_for_a_gpu(models, tmp_path: Path) -> None:
    """Transformers calls the kernels of flash-linear-attention wherever that can be imported."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/fla.py").write_text(GPU_PACKAGE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    _, model_dir = models("qwen3_next")
    flags = ["--from-hf", str(model_dir), "--save", str(tmp_path / "run"), "--check"]
    done = programs.run_python("tools/convert_checkpoint.py", *flags, env=environment, timeout=200)
    assert done.returncode == 0 and "all bits equal" in done.stdout, done.stdout + done.stderr


def test_check_fails_with_other_logits(models, tmp_path: Path, monkeypatch, capsys) -> None:
    """The weights are right, but the options make the model compute something else."""
    hf_dir = models("gpt2")[1]
    real = convert_checkpoint.saved_model
    monkeypatch.setattr(convert_checkpoint, "saved_model", lambda s: replace(real(s), activation="gelu_erf"))
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "ours", "--check") == 1
    out = capsys.readouterr().out
    assert "all bits equal" in out and "logits of 96 random tokens differ by" in out
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "again", "--check-bits") == 0
    out = capsys.readouterr().out
    assert "all bits equal" in out and "logits" not in out


def test_check_of_a_hugging_face_model_needs_transformers(models, tmp_path: Path, monkeypatch, capsys) -> None:
    hf_dir = models("gpt2")[1]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tool("--from-hf", hf_dir, "--save", tmp_path / "ours", "--check") == 3
    error = capsys.readouterr().err
    assert "comparing logits needs the package transformers" in error and "or use --check-bits" in error
    assert not (tmp_path / "ours").exists()


MEASURE_MEMORY = """
import sys, threading, time
sys.modules["transformers"] = None  # an import of it fails
sys.path.insert(0, sys.argv[1])
import convert_checkpoint as tool

def rss():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith("RssAnon"))

tiny, big, out_dir = sys.argv[2:]
assert tool.main(["--from-hf", tiny, "--save", out_dir + "/a", "--check-bits"]) == 0  # does the late imports
assert tool.main(["--load", out_dir + "/a", "--to-hf", out_dir + "/b", "--check-bits"]) == 0
for argv in (["--from-hf", big, "--save", out_dir + "/c"], ["--load", out_dir + "/c", "--to-hf", out_dir + "/d"]):
    before, samples, running = rss(), [rss()], [True]
    def watch():
        while running:
            samples.append(rss())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    assert tool.main([*argv, "--check-bits"]) == 0
    running.clear()
    thread.join()
    print("peak", max(samples) - before)
"""


# Buffers of the threads that read and verify; imports, with what malloc does not return. In MiB. Measured peaks were 31
# to 34 MiB in total, on a busy machine too.
MEMORY_BESIDE_TENSORS = 2 * 4 + 16


def conversion_peaks(tiny: Path, big: Path, directory: Path) -> list[float]:
    """Return the memory, in MiB, that converting the model `big` and converting it back need at most."""
    argv = ["-c", MEASURE_MEMORY, str(ROOT / "tools"), str(tiny), str(big), str(directory)]
    result = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    peaks = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("peak")]
    assert len(peaks) == 2
    return peaks


def test_conversion_needs_little_memory_and_no_transformers(models, tmp_path: Path) -> None:
    hf_model = create_model("llama", tmp_path / "big", hidden_size=256, intermediate_size=1024, num_hidden_layers=32)
    total = sum(p.numel() * 4 for p in hf_model.parameters()) / 2**20
    largest = max(p.numel() * 4 for p in hf_model.parameters()) / 2**20
    del hf_model
    peaks = conversion_peaks(models("gpt2")[1], tmp_path / "big", tmp_path)
    assert total > 100 and max(peaks) < MEMORY_BESIDE_TENSORS + 4 * largest, peaks


def test_old_tensor_names_and_computed_buffers(models, tmp_path: Path) -> None:
    """The first GPT-2 files have no prefix, and contain the causal mask."""
    _, hf_dir = models("gpt2")
    old_dir = copy_model(hf_dir, tmp_path / "old")
    tensors = {name.removeprefix("transformer."): values for name, values in read_tensors(hf_dir).items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH) for n in range(2)}
    head = {"lm_head.weight": tensors["wte.weight"].clone()}  # stored although it is tied
    save_file(tensors | masks | head, old_dir / "model.safetensors")
    assert tool("--from-hf", old_dir, "--save", tmp_path / "ours") == 0
    assert not compare_files(hf_dir, tmp_path / "ours").differing
    head["lm_head.weight"][0, 0] += 1
    save_file(tensors | masks | head, old_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight .* differs from wte.weight"):
        open_model(old_dir)


def test_tensors_that_transformers_ignores_are_not_read(models, tmp_path: Path) -> None:
    """Files of Qwen3.5 have multi-token prediction, which transformers does not have. Others are refused."""
    _, hf_dir = models("qwen3_5_text")
    with_depth = copy_model(hf_dir, tmp_path / "hf")
    tensors = read_tensors(hf_dir)
    save_file(tensors | {"mtp.fc.weight": torch.ones(32, 64)}, with_depth / "model.safetensors")
    assert tool("--from-hf", with_depth, "--save", tmp_path / "ours") == 0
    assert not compare_files(hf_dir, tmp_path / "ours").differing
    save_file(tensors | {"model.mtp.fc.weight": torch.ones(32, 64)}, with_depth / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.mtp.fc.weight .*not a tensor of this model"):
        open_model(with_depth)


def test_check_detects_one_bit(models, tmp_path: Path, capsys) -> None:
    _, hf_dir = models("llama")
    tool("--from-hf", hf_dir, "--save", tmp_path / "ours")
    changed_dir = copy_model(hf_dir, tmp_path / "changed")
    tensors = read_tensors(hf_dir)
    bits = tensors["model.layers.1.self_attn.v_proj.weight"].view(torch.int32)
    bits[3, 7] ^= 1
    tensors["model.norm.weight"][4] += 2.0
    save_file(tensors, changed_dir / "model.safetensors")
    verdict = compare_files(changed_dir, tmp_path / "ours")
    differences = [(d.name.split()[0], d.count, d.index) for d in verdict.differing]
    assert differences == [("model.layers.1.self_attn.v_proj.weight", 1, (1, 3, 7)), ("model.norm.weight", 1, (4,))]
    for phrase in ("2 parts of", "largest: model.norm.weight", "by at most 2"):
        assert phrase in str(verdict)


CONFIG = {**SHAPE, "model_type": "llama", "rms_norm_eps": 1e-6}
QWEN: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4, "add_bias_linear": False},
    **{"normalization": "RMSNorm", "activation": "swiglu", "position_embedding_type": "rope"},
    **{"hidden_dropout": 0.0, "add_qkv_bias": True},
}
EXPERTS = CASES["experts"]
REFUSED = CASES["errors"] | {  # values that TOML lacks: None, and a missing key
    "model_type=None": {"model_type": None},
    "max_window_layers=None": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": None},
    "hidden_size is missing": {"hidden_size": ...},
}
REFUSED = {reason: {**CONFIG, **GPT2, **changes} for reason, changes in REFUSED.items()}
REFUSED |= {reason: {**SHAPE, **EXPERTS["shape"], **changes} for reason, changes in EXPERTS["errors"].items()}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_features_are_refused_by_name(reason: str) -> None:
    config = {key: value for key, value in REFUSED[reason].items() if value is not ...}
    with pytest.raises(CheckpointError) as error:
        read_config(config, None, "config.json")
    assert reason in str(error.value)


@settings(max_examples=40)
@given(bits=st.lists(st.booleans(), min_size=1, max_size=9), window=st.integers(2, 40))
def test_layer_windows_equal_transformers(bits: list[bool], window: int) -> None:
    from transformers import Qwen2Config

    options = {**QWEN, "num_layers": len(bits)}
    if any(bits):
        options |= {"window_size": (window - 1, 0), "window_attn_skip_freq": format_layer_pattern(bits)}
    model = build(options).model
    assert choose_family(model, None, None) == "qwen2"
    written = write_config(model, "qwen2", VOCAB_SIZE, "float32", {})
    hf_config = Qwen2Config(**written)
    assert [kind == "sliding_attention" for kind in hf_config.layer_types] == bits
    assert hf_config.sliding_window == (window if any(bits) else None)
    assert build(read_config(written, None, "")[1]).model.layer_windows == model.layer_windows
    written.pop("layer_types", None)  # old releases read it by the keys that they know, or without a window
    if bits == sorted(bits):
        assert build(read_config(written, None, "")[1]).model.layer_windows == model.layer_windows
    else:
        assert set(build(read_config(written, None, "")[1]).model.layer_windows) == {None}


def test_missing_window_keys_have_transformers_defaults() -> None:
    from transformers import MistralConfig, Qwen3Config

    def windows(**config: Any) -> tuple[int | None, ...]:
        return build(read_config({**CONFIG, **config}, None, "")[1]).model.layer_windows

    assert windows(model_type="mistral") == (MistralConfig().sliding_window,) * 2
    assert windows(model_type="mistral", sliding_window=None) == (None, None)
    hf_config = Qwen3Config(use_sliding_window=True, num_hidden_layers=30)
    expected = [hf_config.sliding_window if kind == "sliding_attention" else None for kind in hf_config.layer_types]
    assert windows(model_type="qwen3", use_sliding_window=True, num_hidden_layers=30) == tuple(expected)
    assert windows(model_type="qwen3", sliding_window=16, max_window_layers=0) == (None, None)


PLAIN = {name: value for name, value in QWEN.items() if name != "add_qkv_bias"}


EXPORT = [(PLAIN | options, family, line) for options, family, line in CASES["export"]["errors"]]
EXPORT += [
    (EXPERTS["options"] | o, name, f"family={name} cannot express.*{line}") for o, name, line in EXPERTS["export"]
]


@pytest.mark.parametrize("options,family,line", EXPORT)
def test_export_refuses_features_that_a_family_lacks(options: dict, family: str, line: str) -> None:
    assert choose_family(build(PLAIN).model, "llama", None) == "llama"
    assert choose_family(build(EXPERTS["options"]).model, None, None) == "mixtral"
    assert choose_family(build(PLAIN | {"window_size": (7, 0)}).model, None, None) == "mistral"
    with pytest.raises(CheckpointError, match=f"(?s){line}"):
        choose_family(build(options).model, family or None, None)


def _index(model_dir: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Split the one file into two with an index, then change the index."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    names = sorted(tensors)
    half = len(names) // 2
    weight_map = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model_dir / file)
        weight_map |= dict.fromkeys(part, file)
    change(weight_map)
    index = {"metadata": {}, "weight_map": weight_map}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))


def _config(model_dir: Path, **values: object) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, **values}))


def _tensors(model_dir: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def _rename(model_dir: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    save_file({change(name): values for name, values in tensors.items()}, model_dir / "model.safetensors")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


LAST = "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "parent": (lambda f: _index(f, lambda m: m.update({NORM: "../evil.safetensors"})), "not the plain name"),
    "backslash": (lambda f: _index(f, lambda m: m.update({NORM: "..\\e.safetensors"})), "not the plain name"),
    "pickle": (lambda f: _index(f, lambda m: m.update({NORM: "model.bin"})), "not the plain name"),
    "number": (lambda f: _index(f, lambda m: m.update({NORM: 3})), "has no weight_map"),  # type: ignore[dict-item]
    "shard": (lambda f: (_index(f, lambda m: None), (f / LAST).unlink()), f"{LAST}: missing"),
    "hole": (lambda f: _index(f, lambda m: m.update({NORM: "model-00001-of-00002.safetensors"})), f"has no {NORM}"),
    "twice": (lambda f: (_tensors(f, lambda t: t.update({NORM[6:]: torch.ones(32)})), _index(f, lambda m: None)),
              "norm.weight in model-0000.*: a duplicate of .*norm.weight in model-0000"),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1]), "not a complete"),
    "nested": (lambda f: (f / "config.json").write_text("[" * 100_000), "cannot be read"),
    "list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "many layers": (lambda f: _config(f, num_hidden_layers=1 << 30), "num_layers=1073741824"),
    "many experts": (lambda f: _config(f, model_type="qwen3_moe", num_experts=1 << 30), "num_experts=1073741824 is out of"),
    "text": (lambda f: _config(f, hidden_size="32"), "hidden_size='32' is not an int"),
    "no vocabulary": (lambda f: _config(f, vocab_size=None), "vocab_size"),
    "heads": (lambda f: _config(f, num_key_value_heads=3), "num_query_groups=3"),
    "other shape": (lambda f: _config(f, intermediate_size=64), r"mlp.down_proj.weight .*shape \(32, 48\), not \(32, 64\)"),
    "other vocabulary": (lambda f: _config(f, vocab_size=94), r"embed_tokens.weight .*shape \(93, 32\), not \(94, 32\)"),
    "missing tensor": (lambda f: _tensors(f, lambda t: t.pop(NORM)), f"{NORM} is missing"),
    "stranger": (lambda f: _tensors(f, lambda t: t.update(extra=torch.ones(1))), "extra in model.safetensors: not a tensor"),
    "integers": (lambda f: _tensors(f, lambda t: t.update({NORM: torch.ones(32).int()})), "I32 is not a floating-point"),
    "no number": (lambda f: _tensors(f, lambda t: t[NORM].__setitem__(3, float("nan"))), f"{NORM} in .*: 1 of 32 values .*nan"),
    "no epsilon": (lambda f: _config(f, rms_norm_eps=float("nan")), "norm_epsilon=nan is not finite"),
    "pipe": (lambda f: _pipe(f / "config.json"), r"config.json: cannot be read \(it is not a regular file"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter_config.json shows .*merge_and_unload"),
    "layers of their own": (lambda f: _config(f, per_layer_config={"1": {"num_attention_heads": 2}}), "per_layer_config: its layers"),
    "another file": (lambda f: _config(f, transformers_weights="w.safetensors"), "transformers_weights: the weights are in a file"),
    "another name": (lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"), "consolidated.safetensors is not read"),
    "below": (lambda f: _index(f, lambda m: m.update({NORM: "part/model.safetensors"})), "'part/model.safetensors' is not the plain name"),
    "compiled": (lambda f: _rename(f, lambda n: f"_orig_mod.{n}"), "21 tensors contain an extra '_orig_mod.'; torch.compile"),
    "compiled blocks": (
        lambda f: _rename(f, lambda n: re.sub(r"(layers\.\d\.)", r"\1_orig_mod.", n)),
        "18 tensors contain an extra '_orig_mod.'; torch.compile",
    ),
    "ddp": (lambda f: _rename(f, lambda n: f"module.{n}"), "an extra 'module.'; DistributedDataParallel"),
    "ddp, compiled": (lambda f: _rename(f, lambda n: f"module._orig_mod.{n}"), "an extra 'module._orig_mod.'"),
    "peft": (lambda f: _rename(f, lambda n: f"base_model.model.{n}"), "an extra 'base_model.model.'; peft.* merge_and_unload"),
    "part of another": (lambda f: _rename(f, lambda n: f"language_model.{n}"), "an extra 'language_model.'; rename"),
    "only pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin can run code"),
    "nothing": (lambda f: (f / "model.safetensors").unlink(), "has neither"),
}  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_directories_are_refused_without_output(models, attack: str, tmp_path: Path, capsys) -> None:
    _, good = models("llama")
    model_dir = copy_model(good, tmp_path / "hf")
    change, reason = HOSTILE[attack]
    change(model_dir)
    capsys.readouterr()  # discard what creating the model printed
    assert tool("--from-hf", model_dir, "--save", tmp_path / "ours") == 3
    error = capsys.readouterr().err
    assert error.startswith("convert_checkpoint.py: ") and "Traceback" not in error
    assert re.search(reason, error, re.DOTALL), error
    output_dir = tmp_path / "ours"
    assert not output_dir.exists() or (
        attack == "no number" and not any(output_dir.iterdir())
    )  # detected only during the write


def _stale(model_dir: Path) -> None:
    """Save a first model in two files with an index, and a second one over it in one file."""
    newer = (model_dir / "model.safetensors").read_bytes()
    _tensors(model_dir, lambda tensors: [values.mul_(0.5) for values in tensors.values()])
    _index(model_dir, lambda m: None)
    (model_dir / "model.safetensors").write_bytes(newer)


def _lone_index(model_dir: Path) -> None:
    _stale(model_dir)
    for shard in model_dir.glob("model-*"):
        shard.unlink()


def _more_shards(model_dir: Path) -> None:
    """Leave a file of an earlier save into more files, which the index does not name."""
    _index(model_dir, lambda m: None)
    save_file({NORM: torch.zeros(32)}, model_dir / "model-00003-of-00003.safetensors")


def _own_index(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")})
    (model_dir / "model.safetensors.index.json").write_text(text)


FILES: dict[str, tuple[Callable[[Path], object], str | None]] = {  # a directory -> why it is refused, or None
    "one file": (lambda f: None, None),
    "shards": (lambda f: _index(f, lambda m: None), None),
    "one file beside older shards": (
        _stale,
        "has model.safetensors, but model.safetensors.index.json names model-00001",
    ),
    "one file beside an index of shards that are gone": (_lone_index, None),
    "an index of one file": (_own_index, None),
    "shards that the index does not name": (_more_shards, None),
    "pickle beside it": (lambda f: (f / "pytorch_model.bin").write_bytes(b"no"), None),
    "other safetensors beside it": (lambda f: save_file({"x": torch.ones(1)}, f / "consolidated.safetensors"), None),
}


@pytest.mark.parametrize("case", FILES)
def test_weight_files_are_chosen_like_transformers(models, case: str, tmp_path: Path, capsys) -> None:
    change, reason = FILES[case]
    model_dir = copy_model(models("llama")[1], tmp_path / "hf")
    change(model_dir)
    code = tool("--from-hf", model_dir, "--save", tmp_path / "ours", "--check-bits")
    if reason is not None:
        assert code == 3 and reason in capsys.readouterr().err
        return
    assert code == 0
    expected = transformers_logits(load_transformers(model_dir))
    torch.testing.assert_close(megalite_logits(tmp_path / "ours"), expected, rtol=0, atol=TOLERANCE)


SOUND = {  # models of transformers that megalite does not have -> the message
    "one expert of each token": (
        "mixtral",
        {"num_experts_per_tok": 1},
        "the softmax over one chosen expert is always 1",
    ),
    "odd rotary part": ("gpt_neox", {"rotary_pct": 0.4}, "rotates an odd number of 8 channels"),
}


def test_text_part_of_a_model_of_images_converts_as_its_refusal_says(tmp_path: Path, capsys) -> None:
    import transformers

    text = transformers.Gemma3TextConfig(**MODELS["gemma3_text"][1])
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    vision |= dict(num_attention_heads=2, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path / "both")
    assert tool("--from-hf", tmp_path / "both", "--save", tmp_path / "ours") == 3
    assert "MODEL.model.language_model.save_pretrained(DIRECTORY)" in capsys.readouterr().err
    model.model.language_model.save_pretrained(tmp_path / "text")
    assert tool("--from-hf", tmp_path / "text", "--save", tmp_path / "ours", "--check") == 0


@pytest.mark.parametrize("case", SOUND)
def test_unsupported_model_is_not_called_damaged(case: str, tmp_path: Path, capsys) -> None:
    name, changes, reason = SOUND[case]
    create_model(name, tmp_path / "hf", **changes)
    capsys.readouterr()
    assert tool("--from-hf", tmp_path / "hf", "--save", tmp_path / "ours") == 3
    error = capsys.readouterr().err
    assert reason in error and "megalite has no such model" in error and "damaged" not in error


def test_conversion_overwrites_nothing(models, tmp_path: Path, capsys) -> None:
    _, model_dir = models("gpt2")
    checkpoint_dir, export_dir = tmp_path / "ours", tmp_path / "hf"
    assert tool("--from-hf", model_dir, "--save", checkpoint_dir) == 0
    assert tool("--from-hf", model_dir, "--save", checkpoint_dir) == 3
    assert "already holds checkpoints" in capsys.readouterr().err
    export_dir.mkdir()
    (export_dir / "mine").write_text("x")
    assert tool("--load", checkpoint_dir, "--to-hf", export_dir) == 3
    assert "is not empty" in capsys.readouterr().err and [p.name for p in export_dir.iterdir()] == ["mine"]
    assert tool("--load", tmp_path / "none", "--to-hf", tmp_path / "new") == 3
    assert "holds no checkpoint" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert tool("--load", checkpoint_dir, "--to-hf", tmp_path / "new", "--vocab-size", 200) == 3
    assert "vocab_size=200 is above the 93 rows" in capsys.readouterr().err and not (tmp_path / "new").exists()


ALONE_OR_NOT = ["--from-hf a --to-hf b", "--load a --save b", "--load a --to-hf b --seq-length 3"]


@pytest.mark.parametrize("flags", [*ALONE_OR_NOT, "--from-hf a --save b --dtype float32"])
def test_contradictory_convert_flags_are_refused(flags: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool(*flags.split())
