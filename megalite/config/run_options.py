"""The options of how a run computes, trains and reads its data."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.field import free, how, training

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")  # those that the launcher passes on to its ranks
KERNELS = ("auto", "triton", "torch")
ATTENTION_KERNELS = ("auto", "cudnn", "flash", "triton", "blocked", "torch")
LONGEST_TIMEOUT = (1_000_000, "is longer than any collective; use at most 1000000")


@dataclass(frozen=True)
class ParallelConfig:
    nproc: int | None = how(
        None,
        "local processes to start when no launcher (torchrun, srun, mpirun) did; default: tp x pp x --dp, else 1",
        above=0,
    )
    device: str = how("auto", "where to compute; auto: cuda where there is a card", choices=("auto", "cpu", "cuda"))
    tensor_model_parallel_size: int = how(1, "tp: ranks that share each layer", flags=("--tp",), above=0)
    pipeline_model_parallel_size: int = how(1, "pp: ranks that share the depth", flags=("--pp",), above=0)
    context_parallel_size: int = how(1, "cp: ranks that share a sequence; only 1 so far", flags=("--cp",), above=0)
    data_parallel_size: int | None = how(
        None,
        "dp: ranks that share the batch; follows from the number of ranks, which it checks",
        flags=("--dp",),
        above=0,
    )
    num_layers_per_virtual_pipeline_stage: int | None = how(
        None, "layers per chunk of the interleaved schedule", above=0
    )
    num_virtual_stages_per_pipeline_rank: int | None = how(
        None, "chunks per pipeline rank of the interleaved schedule", above=0
    )
    pipeline_model_parallel_layout: str | None = how(None, "layers of each stage, as in 'Et|(tt|)*2tL'")
    decoder_first_pipeline_num_layers: int | None = how(
        None, "layers of pipeline rank 0; the others share the rest", above=0
    )
    decoder_last_pipeline_num_layers: int | None = how(
        None, "layers of the last pipeline rank; the others share the rest", above=0
    )
    account_for_embedding_in_pipeline_split: bool = how(False, "the embedding takes the place of a layer")
    account_for_loss_in_pipeline_split: bool = how(False, "the head and the loss take the place of a layer")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = how(
        None,
        "micro-batches that run through a chunk before the next chunk; default pp, the remainder spread over them",
        above=0,
    )
    use_tp_pp_dp_mapping: bool = how(False, "number the ranks in the order tp, pp, dp; default: tp, dp, pp")
    pipeline_schedule: str = how("1f1b", "order of micro-batches in the pipeline", choices=("1f1b", "gpipe"))
    use_distributed_optimizer: bool = how(True, "shard optimizer state over dp (ZeRO-1)")
    overlap_grad_reduce: bool = how(True, "reduce gradients during the last backward")
    grad_reduce_in_bf16: bool = how(False, "round gradients to bf16 for their sum over dp; each rank adds up in fp32")
    overlap_param_gather: bool = how(True, "gather weights during the next forward")
    ddp_bucket_size: int | None = how(None, "elements per gradient bucket; default 40 million", above=0)
    kernels: str = how("auto", "whose kernels run; auto: Triton's on cuda where it is installed", choices=KERNELS)
    attention_kernel: str = how("auto", "for every shape that it can do; auto: by a table", choices=ATTENTION_KERNELS)
    shared_memory: bool = how(True, "cpu: ranks of one machine exchange through shared memory; off: through gloo")
    distributed_backend: str | None = how(None, "default: nccl on cuda, gloo on cpu", choices=("nccl", "gloo", "mpi"))
    distributed_timeout_minutes: float = how(10.0, "how long start-up may take, minutes", above=0, most=LONGEST_TIMEOUT)
    distributed_timeout_seconds_after_init: float | None = how(
        None,
        "how long a collective may take in training, seconds; default: as at start-up",
        above=0,
        most=LONGEST_TIMEOUT,
    )


@dataclass(frozen=True)
class TrainConfig:
    micro_batch_size: int = training(
        0, "samples per micro-batch and dp rank", required=True, stand_in=1, same_as="batch_unit"
    )
    global_batch_size: int | None = training(None, "samples per step; default micro_batch_size x dp", above=0)
    rampup_batch_size: tuple[int, ...] | None = training(
        None, "START INCREMENT SAMPLES: grow the batch over SAMPLES samples"
    )
    step_batch_size_schedule: str | None = training(
        None, "TOKENS:SIZE ...: the global batch from so many tokens on, as '0:768 250B:1536' (K, M, B, T)"
    )
    train_iters: int | None = training(None, "steps", above=0)
    train_samples: int | None = training(None, "samples, instead of --train-iters", above=0)
    iterations_to_skip: tuple[int, ...] | None = training(None, "steps, from 1, whose samples are not trained on")
    skip_train: bool = training(False, "evaluate what --load brings on the validation and the test set, and stop")
    seed: int = training(1234, "of weights, dropout and data order")
    eval_iters: int = free(100, "steps per evaluation; 0 or -1: no evaluation", least=-1)
    eval_global_batch_size: int | None = free(
        None, "samples per step of an evaluation; default: as --global-batch-size", above=0
    )
    eval_micro_batch_size: int | None = free(
        None, "samples per micro-batch there; default: as --micro-batch-size", above=0
    )
    eval_interval: int | None = free(None, "steps between evaluations; default: only at the end", above=0)
    exit_interval: int | None = free(None, "save and stop at a step divisible by this", above=0)
    exit_duration_in_mins: float | None = free(None, "save and stop after this many minutes")
    exit_signal_handler: bool = free(False, "save and stop on SIGTERM, SIGINT and --exit-signal")
    exit_signal: str | None = free(None, "save and stop on this signal", choices=EXIT_SIGNALS)
    recompute_granularity: str | None = how(
        None,
        "activations to recompute in backward; selective: see --recompute-modules",
        choices=("selective", "full"),
        flags=("--recompute-activations=selective",),
    )
    recompute_modules: tuple[str, ...] = how(
        ("core_attn",), "with selective: core_attn (scores and softmax), layernorm, mlp; one or more"
    )
    recompute_method: str | None = how(
        None, "with full: every group of layers, or the first", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = how(None, "uniform: layers per group; block: layers per stage", above=0)
    z_loss_coeff: float = training(
        0.0, "z-loss: this times log^2 of the softmax's sum is added to the loss; PaLM: 1e-4"
    )
    check_for_nan_in_loss_and_grad: bool = free(True, "stop at a loss or gradient that is not finite")
    deterministic_mode: bool = how(False, "refuse operations that may give other bits in another run")
    compile: bool = how(False, "torch.compile between a block's matmuls; not with --kernels triton")
    cuda_graph_impl: str = how(
        "none",
        "local: record a micro-batch once and replay it, for small models",
        choices=("none", "local"),
        flags=("--enable-cuda-graph=local",),
    )
    dry_run: bool = free(False, "print the plan and stop")

    @property
    def batch_unit(self) -> int | None:
        """Micro-batch size where the global batch is a multiple of it; None where that is given."""
        return self.micro_batch_size if self.global_batch_size is None else None


@dataclass(frozen=True)
class OptimConfig:
    optimizer: str = training("adam", "adam is AdamW", choices=("adam", "sgd"))
    optimizer_impl: str = how("auto", "whose AdamW; apex needs its CUDA extension", choices=("auto", "torch", "apex"))
    lr: float | None = training(None, "peak learning rate", stand_in=1.0)
    min_lr: float = training(0.0, "learning rate at the end of decay")
    decoupled_lr: float | None = training(None, "peak learning rate of the word embedding and the head")
    decoupled_min_lr: float | None = training(None, "theirs at the end of decay; default: --min-lr")
    lr_decay_style: str = training(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = training(None, "steps of decay; default train_iters", above=0)
    lr_decay_samples: int | None = training(None, "samples of decay; default train_samples", above=0)
    lr_warmup_iters: int = training(0, "steps of linear warm-up")
    lr_warmup_samples: int = training(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = training(None, "warm-up as a part of the decay")
    lr_warmup_init: float = training(0.0, "learning rate at step 0 of the warm-up")
    lr_wsd_decay_style: str = training(
        "exponential", "shape of WSD's last phase", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = training(None, "steps of WSD's last phase")
    lr_wsd_decay_samples: int | None = training(None, "samples of WSD's last phase")
    weight_decay: float = training(0.01, "decoupled decay; not on norms and biases")
    start_weight_decay: float | None = training(
        None, "weight decay at the start of training, with --weight-decay-incr-style"
    )
    end_weight_decay: float | None = training(None, "weight decay at the end of training, with the same")
    weight_decay_incr_style: str = training(
        "constant", "how weight decay grows from its start to its end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = training(1.0, "largest gradient norm; 0: no clipping")
    adam_beta1: float = training(0.9, "decay of the first moment", below=(1, "is not below 1; use 0.9 to 0.999"))
    adam_beta2: float = training(0.999, "decay of the second moment", below=(1, "is not below 1; use 0.9 to 0.999"))
    adam_eps: float = training(1e-8, "added to the root of the second moment")
    exp_avg_dtype: str = training("fp32", "of the first moment; bf16 is rounded at random", choices=("fp32", "bf16"))
    exp_avg_sq_dtype: str = training(
        "fp32", "of the second moment; bf16 is rounded at random", choices=("fp32", "bf16")
    )
    sgd_momentum: float = training(0.9, "momentum of sgd")


@dataclass(frozen=True)
class PrecisionConfig:
    bf16: bool = training(False, "bfloat16 weights and activations; gradients and main weights in fp32")
    fp16: bool = training(False, "float16 with loss scaling; gradients and main weights in fp32")
    loss_scale: float | None = training(None, "constant loss scale for fp16; default: dynamic", above=0)
    initial_loss_scale: float = training(2.0**32, "where dynamic scaling starts")
    min_loss_scale: float = training(1.0, "lowest dynamic scale", above=0)
    loss_scale_window: int = training(1000, "clean steps before the scale doubles", above=0)
    hysteresis: int = training(2, "overflows before the scale halves", above=0)


@dataclass(frozen=True)
class DataConfig:
    data_path: tuple[str, ...] | None = training(
        None, "PREFIX, or WEIGHT PREFIX pairs, of .bin/.idx files; see --split"
    )
    train_data_path: tuple[str, ...] | None = training(None, "the same for training only; no split")
    valid_data_path: tuple[str, ...] | None = free(None, "the same for validation only; NAME=PREFIX for several sets")
    test_data_path: tuple[str, ...] | None = free(None, "the same for the test only")
    data_args_path: str | None = training(None, "file that holds what --data-path would, for long blends")
    per_split_data_args_path: str | None = training(None, "JSON file with train, valid, test: the three lists above")
    multiple_validation_sets: bool = free(False, "each prefix of --valid-data-path is a set with a loss of its own")
    validation_set_names: tuple[str, ...] | None = free(None, "their names; default: the last part of each prefix")
    split: str | None = training(None, "parts of the documents for training, validation, test; default 969, 30, 1")
    dataloader_type: str = training(
        "single",
        "order of samples: each epoch is shuffled by itself, also with cyclic",
        choices=("single", "cyclic"),
        refused={"external": "it takes a loader of your own; give --data-path"},
    )
    data_cache_path: str | None = how(None, "directory of index caches")
    mmap_bin_files: bool = how(True, "map token files; off: read them, where maps are slow or files may shrink")
    mock_data: bool = training(False, "generated tokens instead of files")
    eod_mask_loss: bool = training(False, "no loss after an end-of-document token")
    reset_position_ids: bool = training(False, "count positions from the start of each document")
    reset_attention_mask: bool = training(False, "attend within the document only (variable-length attention)")
    document_packing: str = training(
        "concatenate",
        "documents end to end, or as few as possible cut (best-fit packing; what is left of a sample is padding)",
        choices=("concatenate", "best-fit"),
    )
    fim_data: bool = training(False, "fill-in-the-middle: rearrange documents of the training data")
    fim_rate: float = training(0.5, "share of documents that are rearranged", most=(1, "is no share; use at most 1"))
    fim_spm_rate: float = training(
        0.5,
        "share of these as suffix, prefix, middle; the others as prefix, suffix, middle",
        most=(1, "is no share; use at most 1"),
    )
    fim_split_sample: str | None = training(None, "token that parts a document into fragments, each cut by itself")
    fim_fragment_rate: float | None = training(
        None, "share of fragments that are rearranged", most=(1, "is no share; use at most 1")
    )
    fim_no_prefix: str | None = training(None, "text: what begins with it stays as it is")
    fim_prefix_token: str = training("<fim_prefix>", "special token of the tokenizer")
    fim_middle_token: str = training("<fim_middle>", "special token of the tokenizer")
    fim_suffix_token: str = training("<fim_suffix>", "special token of the tokenizer")
    fim_pad_token: str = training("<fim_pad>", "special token of the tokenizer, for samples that became shorter")
    fim_eod_token: str | None = training(None, "token that ends a document; default: the tokenizer's own")
    fim_cut_tokens: bool = training(False, "cut documents between tokens instead of characters: faster, a little worse")
    tokenizer_type: str | None = training(
        None,
        "kind of tokenizer; with --vocab-file and --merge-file GPT2BPETokenizer",
        choices=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
        ),
        refused={
            **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), "BERT's; use HuggingFaceTokenizer"),
            "MultimodalTokenizer": "images are not supported; use the tokenizer of its text",
            "NullMultimodalTokenizer": "images are not supported; use NullTokenizer",
            "SFTTokenizer": "conversations are not supported; use HuggingFaceTokenizer on plain text",
        },
    )
    tokenizer_model: str | None = training(None, "tokenizer file")
    tiktoken_pattern: str | None = training(None, "how TikTokenizer splits text: v1, v2, gpt2, cl100k, o200k")
    vocab_file: str | None = training(None, "GPT-2 vocab.json")
    merge_file: str | None = training(None, "GPT-2 merges.txt")
    vocab_size: int | None = training(
        None, "true vocabulary, at least the tokenizer's; default: the tokenizer's", above=0
    )
    padded_vocab_size: int | None = training(
        None,
        "rows of the embedding, instead of the vocabulary rounded up by --make-vocab-size-divisible-by",
        above=0,
    )
