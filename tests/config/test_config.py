"""The command line: Megatron-LM's spellings, every problem at once, exit code 2, no torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest

from megalite.config import cli
from megalite.config.check import check
from megalite.config.field import PATHS, base_type, facts_of, spellings
from megalite.config.megatron_flags import OPTION, known_flags
from megalite.config.option_rules import holds, rules_of
from megalite.config.options import Config, ConfigError, DataConfig, ModelConfig, build, options, padded_vocab_size
from megalite.config.problem import Say
from megalite.config.toml import parse_toml, to_toml
from megalite.models.families import PRESETS

ROOT = Path(__file__).resolve().parents[2]
GOOD = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 16
 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100"""

EXPERTS, GROUPS = "--disable-bias-linear --num-experts", "--moe-router-num-groups"
VIRTUAL, YARN = "--num-layers-per-virtual-pipeline-stage 1", "--position-embedding-type yarn"
POSITIVE = "num_layers tensor_model_parallel_size micro_batch_size log_interval vocab_size padded_vocab_size"
OUT_OF_RANGE = [(name, 0) for name in [*POSITIVE.split(), "peak_tflops", "rotary_percent"]]
OUT_OF_RANGE += [("rotary_seq_len_interpolation_factor", 0), ("hidden_dropout", 1.0), ("attention_dropout", 2.0)]
OUT_OF_RANGE += [("lr_warmup_fraction", 1.5), ("adam_beta1", 1.0), ("adam_beta2", 1.5)]
OUT_OF_RANGE += [("weight_decay", -1.0), ("clip_grad", -1.0)]
# flags added to GOOD -> what the one message must contain (name=value and the remedy's key word)
BAD: list[tuple[str, str]] = [
    *((f"--{name.replace('_', '-')} {value}", f"{name}={value}") for name, value in OUT_OF_RANGE),
    ("--hidden-size 65", "hidden_size=65 is not a multiple"),
    ("--ffn-hidden-size 129 --tensor-model-parallel-size 2", "ffn_hidden_size=129"),
    ("--seq-length 31 --tensor-model-parallel-size 2", "seq_length=31"),
    ("--max-position-embeddings 16", "max_position_embeddings=16 is below seq_length=32; make it at least that"),
    ("--position-embedding-type rope --rotary-percent 0.2", "odd number"),
    ("--no-position-embedding", "position_embedding_type=learned_absolute; use none, or rope"),
    ("--num-experts 8", "add_bias_linear=True with num_experts=8: experts have no biases; give --disable-bias-linear"),
    (
        f"{EXPERTS} 60 --ep 8",
        "num_experts=60 is not a multiple of expert_model_parallel_size=8: use 1, 2, 3, 4, 5 or 6",
    ),
    (f"{EXPERTS} 8 --moe-router-topk 9", "moe_router_topk=9 is above num_experts=8; lower it"),
    (f"{EXPERTS} 8 --moe-router-topk 1", "moe_router_topk=1: the softmax over one chosen expert is always 1"),
    (f"{EXPERTS} 8 --moe-layer-freq [1,0]", "moe_layer_freq=[1,0] has 2 numbers for 4 layers; give one for each"),
    (f"{EXPERTS} 8 --moe-layer-freq [0]*4", "moe_layer_freq=[0]*4 leaves no layer with experts; drop --num-experts"),
    (f"{EXPERTS} 8 --moe-router-num-groups 4", "moe_router_num_groups=4 needs --moe-router-group-topk"),
    (f"{EXPERTS} 8 {GROUPS} 3 --moe-router-group-topk 1", "moe_router_num_groups=3 does not divide num_experts=8"),
    (f"{EXPERTS} 8 {GROUPS} 4 --moe-router-group-topk 5", "moe_router_group_topk=5 is above moe_router_num_groups=4"),
    (f"{EXPERTS} 8 {GROUPS} 8 --moe-router-group-topk 2 --moe-router-topk 3", "does not divide moe_router_topk=3"),
    (f"{EXPERTS} 8 {GROUPS} 4 --moe-router-group-topk 1 --moe-router-topk 3", "is above the 2 experts of"),
    (f"{EXPERTS} 8 --moe-ffn-hidden-size 9 --expert-tensor-parallel-size 2", "does not divide moe_ffn_hidden_size=9"),
    (
        f"{EXPERTS} 8 --tp 2 --moe-shared-expert-intermediate-size 9",
        "does not divide moe_shared_expert_intermediate_size",
    ),
    (
        f"{EXPERTS} 8 --moe-router-load-balancing-type global_aux_loss",
        "is not available (its counts run through a batch)",
    ),
    (f"{EXPERTS} 8 --moe-router-load-balancing-type none none --moe-aux-loss-coeff 0 0", "names one twice"),
    (
        f"{EXPERTS} 8 --moe-aux-loss-coeff 0.1 0.2",
        "moe_aux_loss_coeff=0.1,0.2 has 2 for moe_router_load_balancing_type",
    ),
    (f"{EXPERTS} 8 --moe-aux-loss-coeff inf", "moe_aux_loss_coeff=inf is no finite number of 0 or more"),
    (f"{EXPERTS} 8 --cuda-graph-impl local", "cuda_graph_impl=local with num_experts=8: the host reads"),
    ("--position-embedding-type mrope", "position_embedding_type='mrope' is not one of"),
    ("--position-embedding-type rope --no-rope-freq 0", "no_rope_freq=0 is below 1"),
    ("--position-embedding-type rope --no-rope-freq [1,0]", "no_rope_freq=[1,0] has 2 numbers for 4 layers"),
    ("--position-embedding-type yarn --kv-channels 15", "odd number"),
    (f"{YARN} --rotary-interleaved", "rotary_interleaved=True with position_embedding_type=yarn"),
    ("--position-embedding-type yarn --yarn-beta-slow 40", "yarn_beta_fast=32 is not above yarn_beta_slow=40"),
    ("--position-embedding-type yarn --rotary-base 1", "rotary_base=1.0 turns all channels alike"),
    ("--recompute-activations --recompute-modules moe_act", "recompute_modules=moe_act is not a part of a dense block"),
    ("--recompute-activations --recompute-modules mlp mla_up_proj", "use core_attn, layernorm, mlp"),
    ("--device gpu", "device=gpu is not supported: torch calls it cuda; use cuda"),
    ("--pipeline-model-parallel-size 8", "is above num_layers=4"),
    ("--num-virtual-stages-per-pipeline-rank 2", "virtual pipeline stages need"),
    (VIRTUAL, "virtual pipeline stages need"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "does not divide the 2 layers"),
    (f"{VIRTUAL} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", "give one"),
    ("--lr-decay-samples 100", "use lr_decay_iters"),
    ("--lr-warmup-samples 100", "use lr_warmup_iters"),
    ("--lr-warmup-iters 20", "lr_warmup_iters=20 is not below"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "give one"),
    ("--lr-warmup-init 5", "lr_warmup_init=5.0 is above lr"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-fraction 0.9", "lr_wsd_decay_iters=2 is longer"),
    ("--distributed-timeout-minutes 1e300", "longer than any collective"),
    ("--distributed-backend nccl --device cpu", "use gloo"),
    ("--distributed-backend mpi", "distributed_backend=mpi is in no torch wheel"),
    ("--exit-on-missing-checkpoint", "add --load"),
    ("--num-layers x", "num_layers='x' is not an int"),
    ("--min-lr 1.0", "min_lr=1.0 is above"),
    ("--lr -1", "lr=-1.0 is negative"),
    (f"--seed=-1{'0' * 400}", "is negative; give 0 or more"),  # larger than any float
    ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2", "lr_wsd_decay_iters=9 is longer"),
    ("--swiglu --hidden-size 16", "give --ffn-hidden-size"),
    ("--exp-avg-dtype bf16 --optimizer sgd", "exp_avg_dtype=bf16 is for the AdamW that is built in"),
    ("--optimizer muon --muon-num-ns-steps 4", "muon_num_ns_steps=4 is no multiple of quintic's 5"),
    ("--optimizer-cpu-offload --optimizer muon", "optimizer_cpu_offload with optimizer=muon: whole tensors are"),
    ("--optimizer-cpu-offload --optimizer-impl apex", "optimizer_impl=apex updates on a card, and optimizer_cpu_off"),
    ("--param-cpu-offload --optimizer-cpu-offload", "param_cpu_offload needs --zero-stage 3, shared out once, and"),
    ("--param-cpu-offload --zero-stage 3", "param_cpu_offload needs --zero-stage 3, shared out once, and"),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 1.5", "optimizer_offload_fraction=1.5 is not a share; use"),
    ("--optimizer lars --optimizer-impl apex", "optimizer_impl=apex is an AdamW, and optimizer=lars is not; use auto"),
    ("--optimizer muon --muon-coefficient-type aol", "muon_coefficient_type='aol' is not one of simple, quintic"),
    ("--optimizer muon --muon-no-split-qkv", "--muon-no-split-qkv: queries, keys and values are matrices of their"),
    ("--optimizer muon --muon-scalar-optimizer lion", "AdamW updates what is no matrix"),
    ("--optimizer soap", "optimizer=soap is not supported: there is AdamW, SGD, Muon, LAMB and LARS"),
    ("--exp-avg-sq-dtype fp8", "exp_avg_sq_dtype='fp8' is not one of"),
    ("--bf16 --fp16", "bf16 and fp16 exclude each other; give one"),
    ("--recompute-granularity full", "needs --recompute-method"),
    *(
        (f"--cpu-offloading-num-layers 2 {flags}", f"cpu_offloading_num_layers=2 and {name} exclude each other; give")
        for flags, name in (
            ("--recompute-granularity full --recompute-method uniform", "recompute_granularity=full"),
            ("--compile", "compile=True"),
            ("--cuda-graph-impl local", "cuda_graph_impl=local"),
        )
    ),
    ("--rampup-batch-size 4 4", "three numbers"),
    ("--rampup-batch-size 4 5 100", "is not reached"),
    ("--rampup-batch-size 32 4 100", "is not reached"),
    ("--data-path x", "mock_data and data_path"),
    ("--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-model"),
    ("--tokenizer-type GPT2BPETokenizer", "needs --vocab-file"),
    ("--vocab-file v.json", "vocab_file=v.json is half of GPT-2's tokenizer; give --merge-file too"),
    ("--merge-file m.txt", "merge_file=m.txt is half of GPT-2's tokenizer; give --vocab-file too"),
    ("--tokenizer-type BertWordPieceCase", "tokenizer_type=BertWordPieceCase is not supported: BERT's; use"),
    ("--dataloader-type external", "dataloader_type=external is not supported: it takes a loader of your own"),
    ("--padded-vocab-size 90 --tensor-model-parallel-size 4", "does not divide padded_vocab_size=90"),
    ("--split a,b", "split='a,b' is not up to three numbers >= 0, comma-separated; use for example 969,30,1"),
    ("--tokenizer-type Magic", "tokenizer_type='Magic' is not one of"),
    ("--run-dir s3://b/x", "run_dir='s3://b/x' is a URL; give a local directory"),
    ("--window-size 7", "window_size=7 is not two numbers; give LEFT,RIGHT"),
    ("--window-size 7,x", "window_size=['7,x'] is not an ints"),
    ("--window-size 7,1", "window_size=7,1 has 1 on the right, where a causal model sees nothing; use 7,0"),
    ("--window-size 0,0", "window_size=0,0 lets a token see only itself; give at least 1,0"),
    ("--window-size=-2,0", "window_size=-2,0 is not a window; give at least 1,0, or -1,0 for no limit"),
    ("--window-attn-skip-freq 2", "window_attn_skip_freq=2 has no effect; add --window-size"),
    ("--window-size 7,0 --window-attn-skip-freq 1", "window_attn_skip_freq=1 leaves no layer with the window"),
    ("--window-size 7,0 --window-attn-skip-freq exit()", "window_attn_skip_freq=exit() is neither"),
    ("--timing-log-level 3", "timing_log_level=3 is above 2; use 0, 1 or 2"),
    ("--profile --profile-step-end 10", "profile_step_end=10 is not above profile_step_start=10; raise it"),
    ("--exit-signal SIGKILL", "exit_signal='SIGKILL' is not one of SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP"),
    ("--finetune", "finetune=True has no effect; add --load"),
    ("--load x --finetune --no-load-optim", "no_load_optim has no effect with --finetune"),
    ("--use-checkpoint-args", "use_checkpoint_args needs --load"),
    ("--spike-action rollback", "spike_action=rollback needs checkpoints of all of the run; add --save"),
    ("--start-weight-decay 0.1", "has no effect on a constant one; add --weight-decay-incr-style linear"),
    ("--weight-decay-incr-style linear", "needs --start-weight-decay and --end-weight-decay"),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1",
        "0.2; weight decay only grows",
    ),
    ("--decoupled-lr 1e-4 --min-lr 5e-4", "min_lr=0.0005 is above decoupled_lr=0.0001"),
    ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", "decoupled_min_lr=0.001 is above decoupled_lr=0.0001"),
    ("--iterations-to-skip 0 3", "iterations_to_skip=0,3: steps count from 1"),
    ("--eval-iters -2", "eval_iters=-2 is negative"),
    ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler --load x", "exclude each other"),
    ("--cp 4 --seq-length 28", "context_parallel_size=4 x 2 does not divide seq_length=28: use 24 or 32"),
    ("--cp 2 --tp 4 --seq-length 24", "context_parallel_size=2 x 2 x tp 4 does not divide seq_length=24: use 16 or 32"),
    ("--cp 4 --tp 2 --cp-comm-type a2a", "num_attention_heads=4 / tp 2 is not a multiple of cp 4; use allgather"),
    ("--cp 2 --cp-comm-type a2a+p2p", "cp_comm_type=a2a+p2p is not available; use allgather or a2a"),
    ("--cp 2 --cp-comm-type a2a p2p", "=a2a,p2p has 2 values for num_layers=4; give one, or one for each layer"),
    ("--batch-size 3", "use --micro-batch-size"),
    ("--preset llama3-8", "preset='llama3-8' is unknown; did you mean llama3-8b?"),
]


@pytest.mark.parametrize("flags,message", BAD, ids=[b[0] for b in BAD])
def test_a_bad_configuration_is_refused_with_value_rule_and_remedy(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.read([*GOOD.split(), *flags.split()], PRESETS)
    assert any(message in problem for problem in error.value.problems), error.value.problems
    assert all("\n" not in problem for problem in error.value.problems)


def test_gpt2s_two_files_are_the_default_tokenizer() -> None:
    both = "--vocab-file v.json --merge-file m.txt"
    config, notes = cli.read([*GOOD.split(), *both.split()], PRESETS)
    assert config.data.tokenizer_type == "GPT2BPETokenizer" and notes == []
    assert build(parse_toml(to_toml(config), "x")) == config
    config, notes = cli.read([*GOOD.split(), *both.split(), "--tokenizer-type", "NullTokenizer"], PRESETS)
    said = [f"{x} has no effect with --tokenizer-type NullTokenizer" for x in ("vocab_file=v.json", "merge_file=m.txt")]
    assert config.data.tokenizer_type == "NullTokenizer" and notes == said


@pytest.mark.parametrize("part,rows", [("contradictions", 80), ("without effect", 40)])
def test_every_rule_names_options_and_can_be_said(part: str, rows: int) -> None:
    """Whether it holds or not: a misspelt option of a rule that seldom holds would be found by a user."""
    say = Say(Config(ModelConfig(seq_length=8), data=DataConfig(validation_set_names=("a", "b"))))
    for conditions, text in rules_of(part):
        assert not {holds(term, say, {"complete": True}) for terms in conditions for term in terms} - {True, False}
        assert say(text, option=conditions[0][0][1]), text
    assert len(rules_of(part)) > rows


NULL, LLAMA2 = "--tokenizer-type NullTokenizer", "--tokenizer-type Llama2Tokenizer --tokenizer-model x.model"
BYTES, GPT2 = "--tokenizer-type ByteTokenizer", "--vocab-file v.json --merge-file m.txt"
SIZES = {"": 8192, NULL: 8192, f"{NULL} --vocab-size 99": 99, BYTES: None, GPT2: None, LLAMA2: None}


@pytest.mark.parametrize("tokenizer,size", [*SIZES.items(), (f"{BYTES} --vocab-size 300", 300)])
def test_a_presets_vocabulary_is_for_runs_without_a_tokenizer(tokenizer: str, size: int | None) -> None:
    flags = "--preset tiny --mock-data --micro-batch-size 1 --train-iters 1"
    assert cli.read([*flags.split(), *tokenizer.split()], PRESETS)[0].data.vocab_size == size


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_preset_to_try_out_has_a_rate_which_a_flag_changes(name: str) -> None:
    flags = f"--preset {name} --mock-data --micro-batch-size 1 --train-iters 1"
    assert cli.read(flags.split(), PRESETS)[0].optim.lr == PRESETS[name]["lr"]
    assert cli.read([*flags.split(), "--lr", "7e-5"], PRESETS)[0].optim.lr == 7e-5


def test_rows_of_the_embedding_can_be_given() -> None:
    for tp in ("1", "2"):
        flags = ["--padded-vocab-size", "160", "--tensor-model-parallel-size", tp]
        model = cli.read([*GOOD.split(), *flags], PRESETS)[0].model
        assert padded_vocab_size(97, model.make_vocab_size_divisible_by, int(tp)) == 160


def test_a_flag_without_its_value_is_one_problem() -> None:
    (problem,) = problems_of([*GOOD.split(), "--window-size", "--bf16"])
    assert problem.startswith("--window-size needs a value")


def test_a_save_without_an_interval_is_told_to_be_only_at_the_end() -> None:
    _, notes = cli.read([*GOOD.split(), "--save", "x"], PRESETS)
    assert notes == ["save=x without --save-interval saves only when the run ends or stops; a crash loses all"]
    assert cli.read([*GOOD.split(), "--save", "x", "--save-interval-mins", "9"], PRESETS)[1] == []


NONE, PENDING = "has no effect", "zero_bubble_max_pending_backward=3"
NO_EFFECT = {
    "--min-offloaded-tensor-size 5": [f"min_offloaded_tensor_size=5 {NONE} without --cpu-offloading-num-layers"],
    "--optimizer-offload-fraction 0.5": [f"optimizer_offload_fraction=0.5 {NONE} without --optimizer-cpu-offload"],
    "--optimizer-offload-folder /x": [f"optimizer_offload_folder=/x {NONE} without --optimizer-cpu-offload"],
    "--optimizer-cpu-offload --device cpu": [
        "optimizer_cpu_offload saves nothing with device=cpu, where all memory is the host's"
    ],
    "--num-query-groups 2": ["num_query_groups=2 has no effect without --group-query-attention"],
    "--no-rope-freq 2": ["no_rope_freq=2 has no effect without --position-embedding-type rope"],
    "--position-embedding-type rope --mscale 0.7 --yarn-beta-fast 8": [
        f"{x} {NONE} without --position-embedding-type yarn" for x in ("yarn_beta_fast=8.0", "mscale=0.7")
    ],
    "--delay-wgrad-compute": [f"split_backward {NONE} with pipeline_model_parallel_size=1: there is no bubble to fill"],
    "--pp 2 --zero-bubble-max-pending-backward 3": [f"{PENDING} {NONE} without --split-backward"],
    "--pp 2 --enable-zero-bubble --zero-bubble-max-pending-backward 3": [],
    "--pp 2 --enable-zbh1-pipeline": [],
    "--use-pytorch-profiler": [f"use_pytorch_profiler {NONE} without --profile"],
    "--manual-gc-interval 5": [f"manual_gc_interval=5 {NONE} without --manual-gc"],
    "--log-progress": [f"log_progress {NONE} without --save"],
    "--log-memory-to-tensorboard": [f"log_memory_to_tensorboard {NONE} without --tensorboard-dir"],
    "--recompute-modules mlp": ["recompute_modules=mlp has no effect without --recompute-granularity selective"],
    "--recompute-activations --recompute-modules moe shared_experts mlp": [],  # of experts that a dense model has not
    # values that mean nothing out of the ordinary
    "--mscale 1.0 --mscale-all-dim 0 --rotary-scaling-factor 1.0 --rotary-seq-len-interpolation-factor 1": [],
    "--position-embedding-type rope --no-position-embedding": [],
    "--position-embedding-type none --no-position-embedding": [],
}


@pytest.mark.parametrize("flags", NO_EFFECT)
def test_what_megatron_takes_in_silence_is_a_note(flags: str) -> None:
    assert cli.read([*GOOD.split(), *flags.split()], PRESETS)[1] == NO_EFFECT[flags]


# what a line leaves open -> what Megatron-LM makes of it
MEANS: dict[str, dict[str, object]] = {
    "": {"activation": "gelu"},
    "--disable-bias-linear": {"activation": "gelu_erf"},
    "--no-bias-gelu-fusion": {"activation": "gelu_erf"},
    "--add-qkv-bias --disable-bias-linear": {"activation": "gelu_erf"},
    "--no-bias-gelu-fusion --openai-gelu": {"activation": "gelu"},
    "--swiglu --disable-bias-linear": {"activation": "swiglu"},
    "--disable-bias-linear --openai-gelu --swiglu --no-bias-gelu-fusion": {"activation": "swiglu"},
    "--squared-relu --disable-bias-linear": {"activation": "squared_relu"},
    "--activation gelu --disable-bias-linear": {"activation": "gelu"},
    "--activation gelu_erf": {"activation": "gelu_erf"},
    "--preset gpt2 --disable-bias-linear": {"activation": "gelu_erf"},
    "--preset tiny": {"activation": "swiglu", "groups": 4},
    "--preset tiny --num-query-groups 2": {"groups": 2},
    "--group-query-attention": {"groups": 1},
    "--group-query-attention --num-query-groups 2": {"groups": 2},
    "--num-query-groups 2": {"groups": 4},
    "--use-rotary-position-embeddings --no-position-embedding": {"rotary": (True,) * 4},
    "--no-position-embedding --position-embedding-type rope": {"rotary": (True,) * 4},
    "--position-embedding-type rope --no-rope-freq 2": {"rotary": (True, False) * 2},
    "--position-embedding-type rope --no-rope-freq ([0]*3+[1]*1)*1": {"rotary": (True, True, True, False)},
    "--position-embedding-type none --no-rope-freq 2": {"rotary": (False,) * 4},
}


@pytest.mark.parametrize("flags", MEANS)
def test_what_a_line_leaves_open_is_what_megatron_makes_of_it(flags: str, tmp_path: Path) -> None:
    """And the run's own TOML file says it again."""
    config, _ = cli.read([*GOOD.split(), *flags.split()], PRESETS)
    assert {name: getattr(config.model, name) for name in MEANS[flags]} == MEANS[flags]
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config))
    assert cli.read(["--config", str(path)], PRESETS)[0] == config
    assert build(parse_toml(to_toml(config), "x")) == config


def test_what_an_older_checkpoint_stores_keeps_its_meaning() -> None:
    """Before `completed`, gelu was the tanh form and there were as many groups as heads, unless it said otherwise."""
    stored = "num_layers = 1\nhidden_size = 64\nnum_attention_heads = 4\nadd_bias_linear = false\n"
    model = build(parse_toml(stored + "group_query_attention = true", "x")).model
    assert (model.activation, model.groups) == ("gelu", 4)


def test_all_problems_come_at_once_and_before_torch() -> None:
    flags = [*GOOD.split(), "--hidden-dropout", "3", "--min-lr", "9", "--bf16", "--fp16"]
    assert len(problems_of(flags)) == 3
    assert len(problems_of([*flags, *"--hidden-sise 4 --train-iters x --lr-decay-style round".split()])) == 6
    code = (
        "import sys\nfrom megalite.config import cli\nfrom megalite.models.families import PRESETS\n"
        "try:\n    cli.parse(sys.argv[1:], PRESETS)\nfinally:\n    print('torch' in sys.modules)"
    )
    for options_ in ([], ["-O"]):
        words = [sys.executable, *options_, "-c", code, *flags]
        result = subprocess.run(words, capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert result.returncode == 2 and result.stdout == "False\n" and result.stderr.count("pretrain_gpt.py:") == 3


@pytest.mark.parametrize("spelt", ["7,0", "(7,0)", "7 0", "(7, 0)"])
def test_a_window_is_spelt_as_megatrons_or_as_two_words(spelt: str) -> None:
    words = [spelt] if "(" in spelt else spelt.split()
    config, notes = cli.read([*GOOD.split(), "--window-size", *words, "--window-attn-skip-freq", "3"], PRESETS)
    assert config.model.windows == (8, 8, None, 8) and notes == []
    assert build(parse_toml(to_toml(config), "x")) == config
    config, notes = cli.read([*GOOD.split(), "--window-size=31,0", "--window-attn-skip-freq=[0]*2+[1]*2"], PRESETS)
    assert config.model.windows == (None, None, 32, 32)
    assert notes == ["window_size=31,0 has no effect on sequences of 32 tokens"]


TP2 = "--tensor-model-parallel-size 2 --global-batch-size 20"
OF_WORLD = [(TP2, 3, 4, "world size 3"), (TP2, 16, 4, "use 16 or 32")]
OF_WORLD += [("--profile-ranks 0 5", 4, 8, "profile_ranks=5 is not among 4 ranks; give 0 to 3")]
OF_WORLD += [
    ("--eval-micro-batch-size 4 --eval-global-batch-size 8", 4, 2, "=8 is not a multiple of eval_micro_batch_size 4")
]


@pytest.mark.parametrize("flags,world,good,message", OF_WORLD)
def test_what_depends_on_the_world_size(flags: str, world: int, good: int, message: str) -> None:
    config, _ = cli.read([*GOOD.split(), *flags.split()], PRESETS)
    assert any(message in problem for problem in check(config, world))
    assert check(config, good) == []


def test_layers_of_precedence(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    model = "[model]\nnum_layers = 3\n[train]\ntrain_iters = 5\nmicro_batch_size = 2\n"
    path.write_text(f'preset = "tiny"\nlr = 0.5\n{model}')
    config, _ = cli.read(["--config", str(path), "--mock-data", "--num-layers", "2"], PRESETS)
    assert (config.model.num_layers, config.model.hidden_size, config.optim.lr) == (2, 256, 0.5)
    assert build(parse_toml(to_toml(config), "x")) == config


@pytest.mark.parametrize(
    "text,message",
    [
        ('lr = "3e-4"', "lr='3e-4' is not a float"),
        ("num_layers = 2.5", "num_layers=2.5 is not an int"),
        ("num_layers = true", "num_layers=True is not an int"),
        ("[model]\nlr = 1.0", "belongs in [optim]"),
        ("lr = 1.0\nlr = 2.0", "is not TOML"),
        ("lr = 1.0\n[optim]\nlr = 2.0", "given twice"),
        ("[modle]\nx = 1", "unknown section"),
        ("colour = 1", "unknown key colour"),
        (f"seq_length = {'9' * 5000}", "is not TOML"),
        (f"lr = {'9' * 400}", f"lr={'9' * 200}... is beyond a float"),
        (f"num_layers = '{'x' * 99_999}'", f"num_layers='{'x' * 199}... is not an int"),
        ('save = "sftp://me:secret@host/x"', "save has a password in its URL"),
        ('save = "memory://b/x?token=secret"', "save has a query or fragment, such as a token, in its URL"),
        ('load = "https://h/x#access_token=secret"', "load has a query or fragment"),
        ('export_hf = "s3://secret@host/x"', "export_hf has a name before its host in its URL"),
        ('tokenizer_model = "sftp://me:a/secret@host/x"', "tokenizer_model has a password in its URL"),
        ('data_path = ["1", "simplecache::https://h/x?sig=secret"]', "data_path has a query or fragment"),
        ('save = "a\\u0000b"', "save is not UTF-8 text (b'a\\x00b')"),
        (f'data_path = ["1", "/tmp/{"x" * 5000}"]', "data_path is longer than a path may be"),
        (f'load = "{"x" * 241}/y"', "load is longer than a path may be"),
    ],
)
def test_a_bad_toml_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    said = "\n".join(problems_of([*GOOD.split(), "--config", str(tmp_path / "run.toml")]))
    assert message in said and "secret" not in said


@pytest.mark.parametrize(
    "url",
    ["sftp://me@host/x", "abfs://container@account/x", "s3://b/x?versionId=a1", "hdfs://host:8020/a@b", "/a?token=b@c"],
)
def test_a_url_with_a_name_that_is_no_secret_is_taken(url: str) -> None:
    config, _ = cli.read([*GOOD.split(), "--save", url], PRESETS)
    assert config.checkpoint.save == url


def test_paths_are_told_from_other_texts_and_must_be_utf_8() -> None:
    """By their names: whatever is described as a file, a directory or a prefix."""
    said = re.compile(r"\b(file|files|directory|PREFIX|vocab.json|merges.txt|the same for)\b")
    texts = [f for _, f in options() if base_type(f) in ("str", "strs") and not facts_of(f).choices]
    described = {f.name for f in texts if said.search(facts_of(f).help)} | {"pretrained_checkpoint"}
    assert {f.name for f in texts if PATHS.fullmatch(f.name)} == described
    with pytest.raises(ConfigError, match=r"run_dir is not UTF-8 text \(b'runs/\\xff'\); rename it"):
        cli.read([*GOOD.split(), "--run-dir", os.fsdecode(b"runs/\xff")], PRESETS)
    layout = ["--pipeline-model-parallel-layout", "E|" + "t|" * 200 + "L"]
    assert not [p for p in problems_of([*GOOD.split(), *layout]) if "longer" in p]


def problems_of(words: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        cli.read(words, PRESETS)
    return error.value.problems


def test_a_flag_has_one_meaning() -> None:
    ours = [flag for _, f in options() for flag, _ in spellings(f)]
    assert len(ours) == len(set(ours))
    listed = {flag for flag, known in known_flags().items() if known.verdict == OPTION}
    assert listed <= set(ours), "in megatron_flags.txt as options, and there is none"
    assert not set(ours) & (known_flags().keys() - listed), "options that megatron_flags.txt knows as no option"


def test_the_padded_vocabulary_does_not_depend_on_usual_tp() -> None:
    assert {padded_vocab_size(50257, 128, tp) for tp in (1, 2, 4, 8, 16, 64, 128)} == {50304}
    assert padded_vocab_size(100, 1, 3) == 102


def test_documents_are_up_to_date() -> None:
    for page, flags in (("docs/flags.md", []), ("docs/megatron.md", ["--megatron"])):
        made = programs.python("tools/document_flags.py", *flags)
        assert made.stdout == (ROOT / page).read_text(), f"python tools/document_flags.py {' '.join(flags)} > {page}"


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "examples").glob("*.toml")))
def test_examples_dry_run(path: str) -> None:
    words = [sys.executable, "pretrain_gpt.py", "--config", f"examples/{path}", "--dry-run"]
    text = (ROOT / "examples" / path).read_text()
    env_world = {"RANK": "0", "WORLD_SIZE": "64" if "64gpu" in path else "1", "LOCAL_RANK": "0"}
    env_world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "PATH": "", "OMP_NUM_THREADS": "1"}
    if "tokenizer_model" in text:  # the quickstart's data may not be there: the plan needs only a vocabulary
        kept = [line for line in text.splitlines() if not line.startswith(("data_path", "tokenizer_", "split"))]
        copy = ROOT / "runs" / f".{path}"
        copy.parent.mkdir(exist_ok=True)
        copy.write_text("\n".join(kept).replace("[data]", "[data]\nvocab_size = 8000\nmock_data = true"))
        words[3] = str(copy)
    else:
        words += ["--mock-data"]
    result = programs.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env_world)
    assert result.returncode == 0 and "layers per stage" in result.stdout, result.stderr
