"""Options that several keys of other trainers set together, compared with what those trainers do."""

import itertools
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from megalite.config.options import ConfigError, apply_megatron_defaults, build
from megalite.training.setup import build_schedules
from tools.translation.translate import translate

Tree = dict[str, Any]


@pytest.fixture
def translate_tree(tmp_path: Path):
    def run(tree: Tree, gpus: int | None = None) -> tuple[Tree, str, bool]:
        """Return (option -> value, the text, whether every key has an equivalent)."""
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        text, is_complete = translate(str(tmp_path / "x.yaml"), gpus)
        tables = tomllib.loads(text)
        tables.pop("preset", None)
        return {name: value for table in tables.values() for name, value in table.items()}, text, is_complete

    return run


def problems_of(translate_tree: Any, tree: Tree, gpus: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        translate_tree(tree, gpus)
    assert all(len(problem.splitlines()) == 1 for problem in error.value.problems)
    return list(error.value.problems)


def shard_of(values: Tree, world: int) -> tuple[int, int]:
    """Return (ranks that the weights are sharded over, copies of the weights) of a translation."""
    parallel = build(values | {"num_layers": 8}).parallel
    dp_size = world // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    assert parallel.effective_zero_stage in (0, 3)
    copies = parallel.num_distributed_optimizer_instances
    return (dp_size // copies, copies) if parallel.effective_zero_stage == 3 else (1, dp_size)


DEGREES = [
    (replicate, shard, cp, tp, pp)
    for replicate, shard, cp, tp, pp in itertools.product((1, 2), (-1, 1, 2, 4), (1, 2), (1, 2), (1, 2))
]


@pytest.mark.parametrize(("replicate", "shard", "cp", "tp", "pp"), DEGREES)
def test_torchtitan_shards_over_dp_shard_and_cp(
    translate_tree: Any, replicate: int, shard: int, cp: int, tp: int, pp: int
) -> None:
    world = replicate * max(shard, 3 if shard == -1 else 1) * cp * tp * pp
    dp_shard = world // (replicate * cp * tp * pp) if shard == -1 else shard
    sizes = {"data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard}
    sizes |= {"context_parallel_degree": cp, "tensor_parallel_degree": tp, "pipeline_parallel_degree": pp}
    tree = {"parallelism": sizes, "training": {"local_batch_size": 8}, "model": {"name": "llama3", "flavor": "8B"}}
    values, text, _ = translate_tree(tree, world)
    assert shard_of(values, world) == ((dp_shard * cp, replicate) if dp_shard * cp > 1 else (1, replicate))
    assert values["global_batch_size"] == 8 * replicate * dp_shard
    assert values["micro_batch_size"] == (8 if pp == 1 else 1), "a pipeline cuts a local batch into ones"
    corrections = text.partition("to be given or corrected")[2]
    assert "divide" not in corrections and "multiple" not in corrections


@pytest.mark.parametrize(("replicate", "shard", "cp", "tp"), list(itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2))))
def test_accelerate_shards_over_dp_shard_and_cp(
    translate_tree: Any, replicate: int, shard: int, cp: int, tp: int
) -> None:
    world = replicate * shard * cp * tp
    sizes = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp}
    tree = {"distributed_type": "FSDP", "num_processes": world, "fsdp_config": {"fsdp_version": 2}}
    tree["parallelism_config"] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    values, _, is_complete = translate_tree(tree)
    expected = (shard * cp, replicate) if shard * cp > 1 else (1, replicate)
    assert shard_of(values, world) == expected if world > 1 else values["zero_stage"] == 3
    assert is_complete


def test_fsdp_2_with_only_cp_is_zero_3(translate_tree: Any) -> None:
    """The case of the issue needed 135.7 GiB per rank instead of 68.4 for Llama 3 8B."""
    sizes = {"parallelism_config_dp_shard_size": 1, "parallelism_config_cp_size": 2}
    tree = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": sizes}
    values, _, _ = translate_tree(tree | {"num_processes": 2})
    assert (values["zero_stage"], values["context_parallel_size"]) == (3, 2)


ACCELERATE: dict[str, tuple[Tree, Tree]] = {
    "DDP": ({"distributed_type": "MULTI_GPU"}, {"zero_stage": 0}),
    "a section of FSDP that is not read": (
        {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
        {"zero_stage": 0},
    ),
    "FSDP without a section": ({"distributed_type": "FSDP"}, {"zero_stage": 3}),
    "FSDP 1": ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, {"zero_stage": 3}),
    "FSDP 2": ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, {"zero_stage": 3}),
    "SHARD_GRAD_OP": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        {"zero_stage": 2},
    ),
    "NO_SHARD": ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 3}}, {"zero_stage": 0}),
    "HYBRID_SHARD": (
        {"distributed_type": "FSDP", "num_machines": 2, "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
        {"zero_stage": 3, "num_distributed_optimizer_instances": 2},
    ),
    "HYBRID_SHARD on one machine": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
        {"zero_stage": 3, "num_distributed_optimizer_instances": None},
    ),
    "HYBRID_SHARD_ZERO2": (
        {"distributed_type": "FSDP", "num_machines": 2, "fsdp_config": {"fsdp_sharding_strategy": 5}},
        {"zero_stage": 2, "num_distributed_optimizer_instances": 2},
    ),
    "the strategy as the questions of accelerate config write it": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}},
        {"zero_stage": 2},
    ),
    "weights that stay after forward": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}},
        {"zero_stage": 3, "reshard_after_forward": "chunk"},
    ),
    "a strategy that FSDP 2 does not read": (
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}},
        {"zero_stage": 3},
    ),
    "keys without the prefix": (
        {"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP", "offload_params": True}},
        {"zero_stage": 2, "param_cpu_offload": True},
    ),
    "DeepSpeed": ({"distributed_type": "DEEPSPEED", "deepspeed_config": {}}, {"zero_stage": 2}),
    "DeepSpeed with a stage": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        {"zero_stage": 3},
    ),
    "DeepSpeed with a file": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
        {"zero_stage": None},
    ),
    "Megatron-LM": (
        {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
        {"use_distributed_optimizer": False, "tensor_model_parallel_size": 2, "zero_stage": None},
    ),
    "Ulysses": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": 3},
            "parallelism_config": {"parallelism_config_cp_size": 1, "parallelism_config_sp_size": 2},
        },
        {"zero_stage": 3, "context_parallel_size": 2, "cp_comm_type": ["a2a"]},
    ),
    "one process": ({"distributed_type": "NO", "mixed_precision": "no"}, {"zero_stage": 0, "bf16": None}),
    "no and NO as YAML 1.1 reads them": ({"distributed_type": False, "mixed_precision": False}, {"zero_stage": 0}),
}


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate_model_placement(name: str, translate_tree: Any) -> None:
    tree, expected = ACCELERATE[name]
    values, _, _ = translate_tree(tree | {"num_processes": 4})
    assert {option: values.get(option) for option in expected} == expected


def test_data_parallelism_of_each_trainer(translate_tree: Any) -> None:
    for stage in (0, 1, 2, 3):
        assert (
            translate_tree({"zero_optimization": {"stage": stage}, "train_batch_size": 8}, 8)[0]["zero_stage"] == stage
        )
    assert translate_tree({"train_batch_size": 8}, 8)[0]["zero_stage"] == 0, "DeepSpeed's default"
    assert translate_tree({"zero_optimization": True, "train_batch_size": 8}, 8)[0]["zero_stage"] == 1, (
        "its old spelling"
    )
    groups = {"stage": 3, "mics_shard_size": 4}
    values, _, _ = translate_tree({"zero_optimization": groups, "train_batch_size": 16}, 16)
    assert shard_of(values, 16) == (4, 4)
    values, text, _ = translate_tree({"zero_optimization": groups | {"stage": 2}, "train_batch_size": 16}, 16)
    assert "num_distributed_optimizer_instances" not in values and "DeepSpeed reads it only at stage 3" in text
    optim = {"model": {"micro_batch_size": 1, "optim": {"name": "fused_adam"}}, "trainer": {"devices": 8}}
    assert translate_tree(optim)[0]["zero_stage"] == 0
    for name in ("distributed_fused_adam", "mcore_distributed_optim"):
        optim["model"]["optim"]["name"] = name
        assert translate_tree(optim)[0]["zero_stage"] == 1
    assert "zero_stage = 1" in problems_of(translate_tree, {"model": optim["model"] | {"fsdp": True}})[0]
    fsdp = {"micro_batch_size": 1, "optim": {"name": "fused_adam"}, "fsdp": True}
    for strategy, stage in (("full", 3), ("grad", 2)):
        assert translate_tree({"model": fsdp | {"fsdp_sharding_strategy": strategy}})[0]["zero_stage"] == stage
    assert (
        "NeMo supports only full and grad" in translate_tree({"model": fsdp | {"fsdp_sharding_strategy": "hybrid"}})[1]
    )
    off = {"fsdp": False, "fsdp_sharding_strategy": "full", "fsdp_grad_reduce_dtype": "bf16"}
    values, _, _ = translate_tree({"model": fsdp | off})
    assert values["zero_stage"] == 0 and "grad_reduce_in_bf16" not in values


def test_deepspeed_derives_the_micro_batch_size(translate_tree: Any) -> None:
    assert translate_tree({"train_batch_size": 64}, 8)[0]["micro_batch_size"] == 8
    for tree in ({"train": {"global_batch_size": 64}}, {"model": {"global_batch_size": 64, "encoder_seq_length": 8}}):
        for gpus in (None, 8):
            values, text, _ = translate_tree(tree, gpus)
            assert "micro_batch_size" not in values and "micro_batch_size=0 is not set" in text


def test_megatron_bridge_distributed_optimizer(translate_tree: Any) -> None:
    both = {"ddp": {"use_distributed_optimizer": True}, "optimizer": {"use_distributed_optimizer": False}}
    values, _, is_complete = translate_tree(both | {"train": {"micro_batch_size": 1}})
    assert values["use_distributed_optimizer"] is True and is_complete, "either is enough there"
    neither = {"ddp": {"use_distributed_optimizer": False}, "optimizer": {"use_distributed_optimizer": False}}
    assert translate_tree(neither | {"train": {"micro_batch_size": 1}})[0]["use_distributed_optimizer"] is False
    ddp = {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads",
        "num_distributed_optimizer_instances": 2,
    }
    values, _, _ = translate_tree({"ddp": ddp, "train": {"micro_batch_size": 1}})
    assert build(values).parallel.effective_zero_stage == 2 and values["num_distributed_optimizer_instances"] == 2
    values, _, _ = translate_tree({"dist": {"use_megatron_fsdp": True}, "train": {"micro_batch_size": 1}})
    assert build(values).parallel.effective_zero_stage == 0, "its default strategy shards nothing"
    values, _, _ = translate_tree({"dist": {"use_torch_fsdp2": True}, "ddp": {"use_distributed_optimizer": False}})
    assert build(values).parallel.effective_zero_stage == 3


DISAGREE: dict[str, tuple[Tree, int | None, str]] = {
    "degrees and devices": (
        {"parallelism": {"data_parallel_shard_degree": 4}, "training": {"steps": 9}},
        16,
        "replicate 1 x shard 4 x tp x pp x cp 1 = 4 is not the 16 devices",
    ),
    "devices that are left over": (
        {"parallelism": {"data_parallel_replicate_degree": 3}, "training": {"steps": 9}},
        8,
        "8 data-parallel devices are not a multiple of 3",
    ),
    "a degree": (
        {"parallelism": {"data_parallel_shard_degree": -5}, "training": {"steps": 9}},
        8,
        "data_parallel_shard_degree = -5 is not a size; give 1 or more, or -1 for all remaining ones",
    ),
    "a degree of 0": (
        {"parallelism": {"tensor_parallel_degree": 0}, "training": {"steps": 9}},
        8,
        "parallelism.tensor_parallel_degree = 0 is not a size",
    ),
    "a rest in Accelerate": (
        {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_dp_shard_size": -1}},
        8,
        "dp_shard_size = -1 is not a size; give 1 or more",
    ),
    "sizes and FSDP 1": (
        {
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": 1},
            "parallelism_config": {"parallelism_config_dp_shard_size": 2},
        },
        2,
        "FSDP 1 takes no parallelism_config",
    ),
    "sizes and processes": (
        {"distributed_type": "FSDP", "num_processes": 8, "parallelism_config": {"parallelism_config_dp_shard_size": 2}},
        None,
        "is not the 8 devices",
    ),
    "machines": (
        {"distributed_type": "FSDP", "num_machines": 3, "num_processes": 8},
        None,
        "not a multiple of 3 machines",
    ),
    "fewer devices than machines": (
        {"distributed_type": "FSDP", "num_machines": 8, "num_processes": 64},
        4,
        "4 devices are not a multiple of 8 machines",
    ),
    "nanotron's dp": (
        {"parallelism": {"dp": 4, "tp": 2, "pp": 1, "tp_mode": "ALL_REDUCE"}},
        16,
        "dp 4 x tp x pp x cp 2 = 8 is not the 16 devices",
    ),
    "a local batch that the pipeline cannot cut": (
        {
            "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3},
            "training": {"local_batch_size": 8},
        },
        8,
        "8 is not a multiple of the pipeline's 3",
    ),
    "groups of an unknown number of devices": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "train_micro_batch_size_per_gpu": 1},
        None,
        "zero_optimization.mics_shard_size = 4: sets depend on the number of devices; give --gpus N",
    ),
    "groups that do not divide": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 3}, "train_micro_batch_size_per_gpu": 1},
        8,
        "does not divide data parallel 8",
    ),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_contradictory_sizes_are_an_error(name: str, translate_tree: Any) -> None:
    tree, gpus, message = DISAGREE[name]
    (problem,) = problems_of(translate_tree, tree, gpus)
    assert message in problem


CONFLICTS: dict[str, tuple[Tree, list[str]]] = {
    "a seed twice": (
        {"training": {"seed": 1, "steps": 9}, "debug": {"seed": 2}},
        ["training.seed gives seed = 1, and debug.seed gives 2; keep one"],
    ),
    "an old and a new name": (
        {"lr_scheduler": {"lr_min": 0.1, "min_lr_factor": 0.2}, "training": {"steps": 9}},
        ["lr_scheduler.min_lr_factor gives", "lr_scheduler.lr_min gives"],
    ),
    "a precision": (
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}, "optimizer": {"params": {"max_grad_norm": 2.0}},
         "gradient_clipping": 1.0},
        ["optimizer.params.max_grad_norm gives clip_grad = 2.0, and gradient_clipping gives 1.0; keep one"],
    ),
    "lengths": (
        {"model": {"encoder_seq_length": 2048, "data": {"seq_length": 4096, "splits_string": "1"}}},
        ["model.encoder_seq_length gives seq_length = 2048, and model.data.seq_length gives 4096; keep one"],
    ),
    "two at once": (
        {"model": {"seq_length": 1, "tensor_model_parallel_size": 2}, "dataset": {"seq_length": 2},
         "tokenizer": {"tensor_model_parallel_size": 4}, "train": {"micro_batch_size": 1}},
        ["seq_length = 1", "tensor_model_parallel_size = 2"],
    ),
    "what rules give, and a key": (
        {"model": {"optim": {"name": "fused_adam", "sched": {"name": "CosineAnnealing", "warmup_steps": 10, "min_lr": 1.0}},
                   "lr_warmup_iters": 11, "micro_batch_size": 1}},
        ["gives lr_warmup_iters = 11", "gives 10"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_values_of_one_option_are_a_conflict(name: str, translate_tree: Any) -> None:
    tree, messages = CONFLICTS[name]
    problems = problems_of(translate_tree, tree, 8)
    assert all(any(text in problem for problem in problems) for text in messages), problems


def test_overriding_keys_override(translate_tree: Any) -> None:
    params = {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 1e-4}
    tree = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "train_batch_size": 8}
    scheduler = {"type": "WarmupDecayLR", "params": params}
    values, text, is_complete = translate_tree(tree | {"scheduler": scheduler}, 8)
    assert values["lr"] == 1e-4 and is_complete
    assert "optimizer.params.lr = 0.0003: scheduler.params.warmup_max_lr overrides it: lr = 0.0001" in text
    del params["warmup_max_lr"]
    values, text, _ = translate_tree(tree | {"scheduler": scheduler}, 8)
    assert values["lr"] == 1e-3 and "scheduler.params.warmup_max_lr (default) = 0.001: lr = 0.001" in text
    values, _, _ = translate_tree(tree | {"scheduler": {"type": "WarmupLR", "params": params}}, 8)
    assert values["lr"] == 3e-4 and values["lr_decay_style"] == "constant" and "lr_decay_iters" not in values
    bridge = {"model": {"bf16": False, "fp16": True}, "mixed_precision": "bf16_mixed", "train": {"micro_batch_size": 1}}
    values, _, is_complete = translate_tree(bridge)
    assert (values["bf16"], values["fp16"]) == (True, False) and is_complete
    dirs = {"explicit_log_dir": "a", "exp_dir": "b", "create_wandb_logger": False}
    assert translate_tree({"exp_manager": dirs})[0]["run_dir"] == "a"


def test_old_torchtitan_names_equal_new_ones(translate_tree: Any) -> None:
    old: Tree = {
        "training": {
            "batch_size": 2, "seed": 7, "compile": True, "deterministic": True, "warmup_steps": 3, "steps": 100,
            "data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2,
        },
        "experimental": {"context_parallel_degree": 1, "pipeline_parallel_degree": 1},
        "lr_scheduler": {"lr_min": 0.25},
        "checkpoint": {"enable_checkpoint": True, "interval": 9},
    }  # fmt: skip
    new: Tree = {
        "training": {"local_batch_size": 2, "steps": 100},
        "debug": {"seed": 7, "deterministic": True},
        "compile": {"enable": True},
        "parallelism": {
            "data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2,
            "context_parallel_degree": 1, "pipeline_parallel_degree": 1,
        },
        "lr_scheduler": {"min_lr_factor": 0.25, "warmup_steps": 3},
        "checkpoint": {"enable": True, "interval": 9},
    }  # fmt: skip
    values, _, is_complete = translate_tree(old, 8)
    assert values == translate_tree(new, 8)[0] and is_complete
    assert values["save_interval"] == 9 and values["seed"] == 7 and values["min_lr"] == 2e-4 and values["compile"]


def test_seed_applies_to_weights_and_data(translate_tree: Any) -> None:
    """Nanotron accepts two seeds; here the second has no equivalent."""
    stage = {"name": "main", "start_training_step": 1, "data": {"seed": 7}}
    tree = {"general": {"project": "p", "seed": 3}, "tokens": {"train_steps": 9}, "data_stages": [stage]}
    values, text, is_complete = translate_tree(tree)
    assert values["seed"] == 3 and not is_complete
    assert (
        "data_stages[0].data.seed = 7: there is one seed for weights, dropout and data" in text.partition("no equiv")[2]
    )
    tree["general"].pop("seed")
    values, text, _ = translate_tree(tree)
    assert values["seed"] == 42 and "general.seed (default) = 42: seed = 42" in text
    same = {"rng": {"seed": 5}, "dataset": {"random_seed": 5}, "train": {"micro_batch_size": 1}}
    values, _, is_complete = translate_tree(same)
    assert values["seed"] == 5 and is_complete


def rates_of(values: Tree, length: int) -> list[float]:
    """Return the rate of each update of a run of `length` steps with one sample each."""
    options = {"train_iters": length, "micro_batch_size": 1} | values
    config = build(options | {"global_batch_size": 1})
    schedule = build_schedules(cast(Any, SimpleNamespace(config=config, shape=SimpleNamespace(batch_size=1)))).lr
    return [schedule.at(step) for step in range(length)]


def torchtitan_rate(
    n: int, lr: float, total: int, warmup: int, ratio: float | None, style: str, min_factor: float
) -> float:
    decay = round(total * ratio) if ratio is not None else total - warmup
    decay = min(decay, total - warmup)
    if n < warmup:
        return lr * (n + 1) / warmup
    if n <= total - decay:
        return lr
    progress = (n - (total - decay)) / decay
    height = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[style]
    return lr * (min_factor + (1 - min_factor) * height)


@pytest.mark.parametrize("style", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("ratio", [None, 0.25, 1.0])
@pytest.mark.parametrize("key", ["min_lr_factor", "lr_min"])
def test_torchtitan_schedule(style: str, ratio: float | None, key: str, translate_tree: Any) -> None:
    scheduler = {"warmup_steps": 10, "decay_type": style, key: 0.1} | ({"decay_ratio": ratio} if ratio else {})
    tree = {"optimizer": {"lr": 1e-3}, "lr_scheduler": scheduler, "training": {"steps": 100}}
    values, _, _ = translate_tree(tree, 8)
    reference = [torchtitan_rate(n, 1e-3, 100, 10, ratio, style, 0.1) for n in range(100)]
    rates = rates_of(values, 100)
    assert rates[10:] == pytest.approx(reference[10:], rel=1e-9)
    assert rates[1:10] == pytest.approx(reference[:9], rel=1e-9), "its warmup is a step ahead"


def nanotron_rate(n: int, lr: float, min_lr: float, warmup: int, start: int, steps: int, style: str) -> float:
    if n <= warmup:
        return lr * n / max(warmup, 1)
    if n < start:
        return lr
    if n >= start + steps:
        return min_lr
    progress = (n - start) / steps
    height = {
        "linear": 1 - progress,
        "1-sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[style]
    return min_lr + (lr - min_lr) * height


@pytest.mark.parametrize("style", ["linear", "1-sqrt", "cosine"])
@pytest.mark.parametrize(("start", "steps"), [(None, None), (60, 40), (60, 20), (60, None), (None, 50)])
@pytest.mark.parametrize("min_lr", [1e-4, None])
def test_nanotron_schedule(
    style: str, start: int | None, steps: int | None, min_lr: float | None, translate_tree: Any
) -> None:
    scheduler = {"learning_rate": 1e-3, "lr_warmup_steps": 10, "lr_warmup_style": "linear", "lr_decay_style": style}
    scheduler |= {"lr_decay_starting_step": start, "lr_decay_steps": steps, "min_decay_lr": min_lr}
    tree = {"optimizer": {"learning_rate_scheduler": scheduler}, "tokens": {"train_steps": 100}}
    values, _, _ = translate_tree(tree)
    min_lr, start, steps = (1e-3 if min_lr is None else min_lr), start or 10, steps or 90  # its defaults
    reference = [nanotron_rate(n, 1e-3, min_lr, 10, start, steps, style) for n in range(100)]
    assert rates_of(values, 100) == pytest.approx(reference, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("constant", [0, 20])
def test_nemo_schedule(constant: int, translate_tree: Any) -> None:
    scheduler = {"name": "CosineAnnealing", "warmup_steps": 10, "constant_steps": constant, "min_lr": 1e-4}
    tree = {"model": {"optim": {"lr": 1e-3, "sched": scheduler}}, "trainer": {"max_steps": 100}}
    values, _, _ = translate_tree(tree)
    decay = 100 - constant - 10
    reference = [1e-3 * (n / 10 if constant else (n + 1) / 11) for n in range(11)]
    reference += [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * min(1, (n - 10) / decay))) for n in range(11, 100)]
    rates = rates_of(values, 100)
    assert rates[:10] + rates[11:] == pytest.approx(reference[:10] + reference[11:], rel=1e-9)
    del tree["model"]["optim"]["sched"]
    assert rates_of(translate_tree(tree)[0], 100) == [1e-3] * 100


def test_deepspeed_schedules(translate_tree: Any) -> None:
    tree: Tree = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    assert rates_of(translate_tree(tree, 8)[0], 100) == [1e-3] * 100, "without a scheduler the rate stays"
    params = {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3}
    up = [1e-4 + 9e-4 * n / 10 for n in range(10)]
    for name, down in {
        "WarmupLR": [1e-3] * 90,
        "WarmupDecayLR": [1e-3 * (100 - n) / 90 for n in range(10, 100)],
    }.items():
        scheduler = {"type": name, "params": params | ({"total_num_steps": 100} if name == "WarmupDecayLR" else {})}
        values, _, _ = translate_tree(tree | {"scheduler": scheduler}, 8)
        assert rates_of(values, 100) == pytest.approx(up + down, rel=1e-9)
    params = {"warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 100}
    values, text, _ = translate_tree(tree | {"scheduler": {"type": "WarmupCosineLR", "params": params}}, 8)
    assert "scheduler.params.cos_min_ratio (default) = 0.0001: min_lr = 1e-07" in text
    cosine = [1e-7 + (1e-3 - 1e-7) * 0.5 * (1 + math.cos(math.pi * (n - 9) / 90)) for n in range(10, 100)]
    assert rates_of(values, 101)[11:] == pytest.approx(cosine, rel=1e-6), "its decay is a step ahead"
    values, text, is_complete = translate_tree(tree | {"scheduler": {"type": "WarmupLR"}}, 8)
    assert not is_complete and 'warmup_type (default) = "log": the warmup is linear' in text


def test_relative_rate_without_a_base_has_no_equivalent(translate_tree: Any) -> None:
    scheduler = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 9, "warmup_type": "linear", "cos_min_ratio": 0.1},
    }
    values, text, is_complete = translate_tree({"train_batch_size": 8, "scheduler": scheduler}, 8)
    assert not is_complete and "min_lr" not in values
    assert (
        "cos_min_ratio = 0.1: it is a fraction of the learning rate, which the file does not have; give --min-lr"
        in text
    )
    nanotron_scheduler = {"learning_rate": 1e-3, "lr_decay_style": "1-sqrt", "lr_decay_starting_step": 5}
    _, text, is_complete = translate_tree({"optimizer": {"learning_rate_scheduler": nanotron_scheduler}})
    assert not is_complete and "lr_decay_starting_step = 5: the file does not contain the number of steps" in text


DEFAULTS = [
    (name, number, case)
    for name, cases in tomllib.loads((Path(__file__).parent / "defaults.toml").read_text("utf-8")).items()
    for number, case in enumerate(cases)
]


def merge(base: Any, changes: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return base | {key: merge(base[key], value) if key in base else value for key, value in changes.items()}


@pytest.mark.parametrize(("name", "number", "case"), DEFAULTS, ids=[f"{name}-{number}" for name, number, _ in DEFAULTS])
def test_missing_key_has_the_other_trainers_default(name: str, number: int, case: Tree, translate_tree: Any) -> None:
    """The defaults are set one at a time, so that none hides behind another, and then all together."""
    base = case["base"]
    explicit = {key: value for key, value in case.items() if key != "base"}
    gpus = None if name in ("accelerate", "nanotron", "nemo") else 8
    expected = build(apply_megatron_defaults(translate_tree(base, gpus)[0]))
    leaves = list(leaves_of(explicit))
    assert len(leaves) > 1
    for tree in [*leaves, explicit]:
        assert build(apply_megatron_defaults(translate_tree(merge(base, tree), gpus)[0])) == expected, tree


def leaves_of(tree: Tree) -> Iterator[Tree]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ({key: inner} for inner in leaves_of(value))
        else:
            yield {key: value}
