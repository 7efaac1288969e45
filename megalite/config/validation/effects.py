"""Options that have no effect because of others, or another effect than expected.

These are not errors, because Megatron-LM accepts the same options; a run prints them as notes.
"""

from collections.abc import Iterator

from megalite.config.option import flag_name
from megalite.config.options import Config, ModelConfig
from megalite.config.problems import Problem, is_set, no_effect, options_set, requires, shown
from megalite.config.run_options import SENTENCEPIECE


def position_notes(config: Config) -> Iterator[Problem]:
    model = config.model
    kind = model.position_embedding_type
    if model.multi_latent_attention:
        for name in options_set(config, "kv_channels", "num_query_groups"):
            if name == "num_query_groups" and model.group_query_attention:
                continue  # refused
            yield Problem(
                f"{shown(config, name)} has no effect with multi_latent_attention=True, where every head has a key of "
                "--qk-head-dim and --qk-pos-emb-head-dim channels and a value of --v-head-dim",
                options=(name, "multi_latent_attention"),
            )
    elif model.num_query_groups is not None and not model.group_query_attention:
        yield no_effect(shown(config, "num_query_groups"), without="group_query_attention")
    if model.no_weight_decay_cond_type and not model.qk_layernorm:
        yield requires(shown(config, "no_weight_decay_cond_type"), "qk_layernorm")
    if model.qk_norm_epsilon is not None and not model.qk_layernorm:
        yield no_effect(shown(config, "qk_norm_epsilon"), without="qk_layernorm")
    if not model.multi_latent_attention:
        latent_only = (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
            "mla_rotary_interleaved",
        )
        for name in options_set(config, *latent_only):
            yield no_effect(shown(config, name), without="multi_latent_attention")
    if not model.uses_delta_rule:
        linear_only = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim")
        linear_only += ("linear_num_key_heads", "linear_num_value_heads", "linear_allow_neg_eigval")
        linear_only += ("linear_norm_epsilon", "linear_attention_kernel")
        for name in options_set(config, *linear_only):
            yield no_effect(
                shown(config, name), without="experimental_attention_variant", value="gated_delta_net or kda"
            )
    if not model.uses_mamba2:
        for name in options_set(config, "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"):
            yield no_effect(shown(config, name), without="hybrid_layer_pattern", value="with M")
    pattern = model.hybrid_layer_pattern or ""
    if pattern and set(pattern) <= set("GKM-E|/"):  # a plugin's mixer may read options of attention
        for name in options_set(config, "attention_output_gate", "qk_layernorm", "window_size", "softmax_type"):
            yield Problem(
                f"{shown(config, name)} has no effect: hybrid_layer_pattern={pattern} has no attention",
                options=(name, "hybrid_layer_pattern"),
            )
    if model.linear_attention_freq is not None and model.experimental_attention_variant is None:
        yield no_effect(
            shown(config, "linear_attention_freq"),
            without="experimental_attention_variant",
            value="gated_delta_net or kda",
        )
    if model.no_rope_freq and not model.allows_rope:
        yield no_effect(shown(config, "no_rope_freq"), without="position_embedding_type", value="rope")
    if model.rotary_local_base is not None:
        if kind not in ("rope", "yarn"):
            yield no_effect(shown(config, "rotary_local_base"), without="position_embedding_type", value="rope")
        if model.window_size is None:
            yield no_effect(shown(config, "rotary_local_base"), without="window_size")
    yarn_only = (
        "rotary_scaling_factor",
        "yarn_original_max_position_embeddings",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_correction_range_round_to_int",
        "mscale",
        "mscale_all_dim",
    )
    if kind != "yarn":
        for name in options_set(config, *yarn_only):
            yield no_effect(shown(config, name), without="position_embedding_type", value="yarn")


def mtp_notes(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.num_mtp_depths:
        yield Problem(
            f"mtp_num_layers={model.num_mtp_depths}: losses of depths are summed over the global batch and divided by "
            "the number of the model's labels; Megatron-LM divides by the labels of each micro-batch, so that its "
            "gradients depend on how masked labels are spread over ranks",
            options=("mtp_num_layers", "hybrid_layer_pattern"),
        )
        return
    for name in options_set(config, "mtp_loss_scaling_factor", "mtp_use_repeated_layer"):
        yield no_effect(shown(config, name), without="mtp_num_layers")


def context_parallel_notes(config: Config) -> Iterator[Problem]:
    cp = config.parallel.context_parallel_size
    replaced = [kind for kind in ("p2p", "a2a+p2p") if kind in config.model.cp_comm_type]
    if cp > 1 and replaced:
        same_bytes = ", which moves the same bytes" if replaced == ["p2p"] else "; a2a moves fewer bytes"
        yield Problem(
            f"cp_comm_type={' and '.join(replaced)} is replaced by allgather{same_bytes}",
            options=("cp_comm_type", "context_parallel_size"),
        )
    if cp == 1 and is_set(config, "cp_comm_type"):
        yield no_effect(shown(config, "cp_comm_type"), without="context_parallel_size")


def expert_notes(config: Config) -> Iterator[Problem]:
    model = config.model
    expert_only = (
        "moe_layer_freq",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_group_score_topk",
        "moe_router_enable_expert_bias",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_dtype",
        "moe_use_upcycling",
        "moe_router_force_load_balancing",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
    if model.num_experts is None:
        for name in options_set(config, *expert_only):
            yield no_effect(shown(config, name), without="num_experts")
        if config.log.moe_per_layer_logging and not _mixers_have_losses(model):
            yield no_effect("moe_per_layer_logging", without="num_experts")
    if model.num_experts:
        yield from _expert_tensor_parallel_notes(config)
        yield from _balancing_notes(config)
    if model.moe_router_pre_softmax and model.moe_router_score_function == "sigmoid":
        yield Problem(
            "moe_router_pre_softmax has no effect with moe_router_score_function=sigmoid",
            options=("moe_router_pre_softmax", "moe_router_score_function"),
        )
    if is_set(config, "moe_router_bias_update_rate") and not model.moe_router_enable_expert_bias:
        yield no_effect(shown(config, "moe_router_bias_update_rate"), without="moe_router_enable_expert_bias")


def _mixers_have_losses(model: ModelConfig) -> bool:
    try:
        return bool(model.layer_losses)
    except ValueError:  # an invalid pattern, which is reported
        return True


def _expert_tensor_parallel_notes(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    if parallel.expert_tensor_parallel_size == 1 and tp > 1 and config.model.expert_ffn_size % tp == 0:
        yield Problem(
            "expert_tensor_parallel_size=1: experts are not sharded over tp; Megatron-LM's default is "
            f"tensor_model_parallel_size={tp}, which --expert-tensor-parallel-size {tp} gives",
            options=("expert_tensor_parallel_size", "tensor_model_parallel_size", "num_experts"),
        )


def _balancing_notes(config: Config) -> Iterator[Problem]:
    model = config.model
    kinds = model.moe_router_load_balancing_type
    if "global_aux_loss" in model.aux_loss_coeffs:
        yield Problem(
            f"{shown(config, 'moe_router_load_balancing_type')}: it depends on how dp and accumulation split a "
            "batch, as in Megatron-LM; seq_aux_loss and --moe-router-enable-expert-bias do not",
            options=("moe_router_load_balancing_type", "moe_router_enable_expert_bias", "num_experts"),
        )
    has_loss = any(kind.endswith("aux_loss") for kind in kinds)
    if has_loss and is_set(config, "moe_router_load_balancing_type") and not model.aux_loss_coeffs:
        yield Problem(
            f"{shown(config, 'moe_router_load_balancing_type')} has no effect with "
            f"{shown(config, 'moe_aux_loss_coeff')}; give one, as 0.01",
            options=("moe_router_load_balancing_type", "moe_aux_loss_coeff", "num_experts"),
        )
    if model.moe_router_force_load_balancing:
        yield Problem(
            "moe_router_force_load_balancing: experts are chosen at random, which is for benchmarks only",
            options=("moe_router_force_load_balancing", "num_experts"),
        )


def parallel_notes(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    pp, stage = parallel.pipeline_model_parallel_size, parallel.effective_zero_stage
    if parallel.split_backward and pp == 1:
        yield Problem(
            f"split_backward has no effect with pipeline_model_parallel_size={pp}: there is no bubble to fill",
            options=("split_backward", "pipeline_model_parallel_size"),
        )
    if parallel.zero_bubble_max_pending_backward is not None and not parallel.split_backward:
        yield no_effect(shown(config, "zero_bubble_max_pending_backward"), without="split_backward")
    if parallel.grad_reduce_in_bf16 and not config.precision.bf16:
        yield no_effect("grad_reduce_in_bf16", without="bf16")
    if parallel.grad_reduce_in_fp16 and not config.precision.fp16:
        yield no_effect("grad_reduce_in_fp16", without="fp16")
    if parallel.data_parallel_sharding_strategy is not None and not parallel.use_megatron_fsdp:
        yield no_effect(shown(config, "data_parallel_sharding_strategy"), without="use_megatron_fsdp")
    if parallel.reshard_after_forward != "auto" and stage < 3:
        yield Problem(
            f"reshard_after_forward={parallel.reshard_after_forward} has no effect below ZeRO stage 3",
            options=("reshard_after_forward",),
        )
    if parallel.num_distributed_optimizer_instances > 1 and not stage:
        yield Problem(
            f"{shown(config, 'num_distributed_optimizer_instances')} has no effect at ZeRO stage 0",
            options=("num_distributed_optimizer_instances",),
        )


def optimizer_notes(config: Config) -> Iterator[Problem]:
    optim, device = config.optim, config.parallel.device
    muon_only = (
        "muon_momentum",
        "muon_nesterov",
        "muon_num_ns_steps",
        "muon_coefficient_type",
        "muon_scale_mode",
        "muon_extra_scale_factor",
        "muon_fp32_matmul_prec",
    )
    if not optim.is_muon:
        for name in options_set(config, *muon_only):
            yield no_effect(shown(config, name), without="optimizer", value="muon")
    if is_set(config, "lars_trust_coefficient") and optim.optimizer != "lars":
        yield no_effect(shown(config, "lars_trust_coefficient"), without="optimizer", value="lars")
    if optim.decoupled_min_lr is not None and optim.decoupled_lr is None:
        yield no_effect(shown(config, "decoupled_min_lr"), without="decoupled_lr")
    if device == "cpu":
        for name in options_set(config, "optimizer_cpu_offload", "param_cpu_offload"):
            yield Problem(
                f"{name} saves nothing with device={device}, where all memory is the host's", options=(name, "device")
            )
    if not optim.optimizer_cpu_offload:
        for name in options_set(config, "optimizer_offload_fraction", "optimizer_offload_dir"):
            yield no_effect(shown(config, name), without="optimizer_cpu_offload")


def mup_notes(config: Config) -> Iterator[Problem]:
    model = config.model
    scale_options = ("mup_base_head_dim", "mup_attn_scale_power")
    if not model.use_mup:
        for name in options_set(
            config, "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult", *scale_options
        ):
            yield no_effect(shown(config, name), without="use_mup")
    elif model.softmax_scale is not None:
        for name in options_set(config, *scale_options):
            yield Problem(
                f"{shown(config, name)} has no effect with softmax_scale={model.softmax_scale}, which is used as it is",
                options=(name, "use_mup", "softmax_scale"),
            )


def training_notes(config: Config) -> Iterator[Problem]:
    train = config.train
    if is_set(config, "min_offloaded_tensor_size") and not train.cpu_offloading_num_layers:
        yield no_effect(shown(config, "min_offloaded_tensor_size"), without="cpu_offloading_num_layers")
    if train.step_batch_size_schedule and train.train_iters is not None:
        yield Problem(
            "step_batch_size_schedule with train_iters: an iteration of warmup and decay counts micro_batch_size x "
            "data parallel samples, as in Megatron-LM; --train-samples and --lr-*-samples are unambiguous",
            options=("step_batch_size_schedule", "train_iters", "micro_batch_size", "train_samples"),
        )
    if train.spike_action != "log" and not (train.check_for_spiky_loss or train.check_for_large_grads):
        yield Problem(
            f"spike_action={train.spike_action} has no effect without --check-for-spiky-loss or "
            "--check-for-large-grads",
            options=("spike_action", "check_for_spiky_loss", "check_for_large_grads"),
        )
    if is_set(config, "recompute_modules") and train.recompute_granularity != "selective":
        modules = " ".join(train.recompute_modules)
        yield no_effect(f"recompute_modules={modules}", without="recompute_granularity", value="selective")
    elif "layernorm" in train.recompute_modules and config.model.norm_placement == "output":
        yield Problem(
            "recompute_modules=layernorm has no effect with norm_placement=output, where no layer has a norm of inputs",
            options=("recompute_modules", "norm_placement"),
        )
    if train.recompute_granularity != "full":
        for name in options_set(config, "recompute_num_layers", "recompute_method"):
            yield no_effect(shown(config, name), without="recompute_granularity", value="full")


def data_notes(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.dataloader_type == "cyclic":
        yield Problem(
            "dataloader_type=cyclic: samples are shuffled within each epoch, not over all epochs together",
            options=("dataloader_type",),
        )
    if config.model.window_attn_skip_freq and not config.model.window_size:
        yield no_effect(shown(config, "window_attn_skip_freq"), without="window_size")
    if data.validation_set_names and not data.multiple_validation_sets:
        names = " ".join(data.validation_set_names)
        yield no_effect(f"validation_set_names={names}", without="multiple_validation_sets")
    if data.mock_data:
        for name in options_set(config, "fim_data", "document_packing"):
            yield Problem(f"{shown(config, name)} has no effect on mock_data", options=(name, "mock_data"))
    yield from _tokenizer_notes(config)


def _tokenizer_notes(config: Config) -> Iterator[Problem]:
    """Yield a note for each file or option that the tokenizer does not read."""
    kind = config.data.tokenizer_type
    if not kind:
        return
    with_tokenizer_model = (*SENTENCEPIECE, "HuggingFaceTokenizer", "TikTokenizer")
    ineffective: list[str] = []
    if kind in ("GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer"):
        ineffective.append("tokenizer_model")
    if kind != "TikTokenizer":
        ineffective.append("tiktoken_pattern")
    if kind in (*with_tokenizer_model, "ByteTokenizer", "NullTokenizer"):
        ineffective += ["vocab_file", "merge_file"]
    for name in options_set(config, *ineffective):
        yield Problem(
            f"{shown(config, name)} has no effect with {flag_name('tokenizer_type')} {kind}",
            options=(name, "tokenizer_type"),
        )


def checkpoint_notes(config: Config) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    has_interval = checkpoint.save_interval is not None or checkpoint.save_interval_mins is not None
    if checkpoint.save and not has_interval:
        yield Problem(
            f"save={checkpoint.save} without --save-interval saves only when the run ends or stops; a crash loses all",
            options=("save", "save_interval", "save_interval_mins"),
        )
    if not checkpoint.save:
        for name in options_set(config, "save_interval", "keep_last", "save_retain_interval", "no_save_optim"):
            yield no_effect(shown(config, name), without="save")
    if not checkpoint.load:
        for name in options_set(config, "no_load_optim", "finetune"):
            yield no_effect(shown(config, name), without="load")
        if checkpoint.exit_on_missing_checkpoint and checkpoint.pretrained_checkpoint:
            yield Problem(
                "exit_on_missing_checkpoint has no effect without --load: a missing pretrained_checkpoint always stops "
                "a run",
                options=("exit_on_missing_checkpoint", "load", "pretrained_checkpoint"),
            )
    if checkpoint.finetune and checkpoint.no_load_optim and checkpoint.load:
        yield Problem(
            "no_load_optim has no effect with --finetune, which loads weights only",
            options=("no_load_optim", "finetune", "load"),
        )


def log_notes(config: Config) -> Iterator[Problem]:
    log, operations = config.log, config.operations
    if log.log_progress and not config.checkpoint.save:
        yield no_effect("log_progress", without="save")
    tensorboard_only = (
        "log_timers_to_tensorboard",
        "log_validation_ppl_to_tensorboard",
        "log_memory_to_tensorboard",
        "log_world_size_to_tensorboard",
        "moe_per_layer_logging",
    )
    if not log.tensorboard_dir:
        for name in options_set(config, *tensorboard_only):
            yield no_effect(name, without="tensorboard_dir")
    if operations.use_pytorch_profiler and not operations.profile:
        yield no_effect("use_pytorch_profiler", without="profile")
    if operations.manual_gc_interval and not operations.manual_gc:
        yield no_effect(shown(config, "manual_gc_interval"), without="manual_gc")


def window_notes(config: Config) -> Iterator[Problem]:
    window, seq_length = config.model.window_size, config.model.seq_length
    if window is not None and len(window) == 2 and 0 < seq_length <= window[0] + 1:
        yield Problem(
            f"{shown(config, 'window_size')} has no effect on sequences of {seq_length} tokens",
            options=("window_size", "seq_length"),
        )
