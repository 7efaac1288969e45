"""The kernels of flash-linear-attention behind `delta_rule`: its definition, documents, states, and what is refused.

They run in Triton's interpreter, in a process that alone can import the package (fla_interpreter.py). The interpreter
reads bf16 as integers, so half precision is fp16 here.
"""

import multiprocessing
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from fla_interpreter import DIRECTORY, use_interpreter
from test_recurrence_kernels import cast, changed_by_another_document, hard_inputs, inputs_of, results_of
from train_cases import DOCUMENT_FLAGS, close_runs, config_from, run_from

from megalite.common.optional_packages import MissingPackageError
from megalite.kernels import delta_rule_fla, dispatch
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs, delta_rule, delta_rule_reference
from megalite.kernels.dispatch import KernelError, runs_fla, set_kernel_options
from megalite.launch.rank_info import RankInfo
from megalite.planning.run_plan import make_run_plan
from megalite.training.datasets import build_datasets
from megalite.training.job.preflight import SetupError, check_machine
from megalite.training.logging.plan_summary import format_plan
from megalite.training.train_step import train_step

Call = Callable[..., Any]
KINDS = ("gdn", "kda")
NORMALIZED = Recurrence(0.4, normalize_qk=True)
MAX_ERROR = 1e-5  # of any fp32 result, relative to its largest element
PATTERN = """--hybrid-layer-pattern G-K-M-*- --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 24 --seq-length 24
 --max-position-embeddings 24 --linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 6
 --linear-value-head-dim 5 --mamba-num-groups 1 --mamba-num-heads 2 --mamba-head-dim 4 --mamba-state-dim 4
 --micro-batch-size 2 --global-batch-size 2 --lr 0.01 --mock-data --tokenizer-type NullTokenizer --vocab-size 31 --train-iters 2 --eval-iters 0"""
IS_INSTALLED = dispatch.fla_version() is not None or DIRECTORY.is_dir()


def runs_package(test: Call) -> Call:
    """Mark a test that runs the package's kernels."""
    return pytest.mark.nightly(pytest.mark.skipif(not IS_INSTALLED, reason=f"needs fla-core in {DIRECTORY}")(test))


@pytest.fixture(autouse=True)
def default_kernels() -> Iterator[None]:
    yield
    set_kernel_options("auto", "auto")


@pytest.fixture(scope="module")
def fla() -> Iterator[Call]:
    """Return a caller of module-level functions in the process that runs the package's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delenv("MEGALITE_KERNELS", raising=False)
        pool = multiprocessing.get_context("spawn").Pool(1, use_interpreter)
    with pool:
        yield lambda fn, *args: pool.apply(fn, args)


def errors(inputs: RecurrenceInputs, recurrence: Recurrence, dtype: torch.dtype = torch.float32) -> list[float]:
    """Return the errors of outputs, last states and gradients, relative to the largest element of each."""
    set_kernel_options("auto", "auto", "fla")
    rounded = cast(inputs, dtype)
    with mock.patch.object(delta_rule_fla, "delta_rule", side_effect=delta_rule_fla.delta_rule) as package:
        actual = results_of(delta_rule, rounded, recurrence)
    assert package.call_count == 1
    expected = results_of(delta_rule_reference, cast(rounded, torch.float64), recurrence)
    assert all(a.dtype == torch.float32 if i == 1 else a.dtype == dtype for i, a in enumerate(actual[:-1]))
    return [float((a.double() - e).abs().max() / e.abs().max()) for a, e in zip(actual, expected, strict=True)]


@runs_package
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("S,B,H,K,V", [(2, 1, 1, 3, 2), (70, 2, 2, 5, 6), (130, 1, 1, 70, 20)])
def test_package_equals_the_definition(fla: Call, kind: str, S: int, B: int, H: int, K: int, V: int) -> None:
    assert max(fla(errors, inputs_of(kind, S, B, H, K, V), NORMALIZED)) < MAX_ERROR


@runs_package
def test_value_heads_share_a_key_head(fla: Call) -> None:
    inputs = inputs_of("gdn", 70, 2, 4, 5, 6)
    inputs = inputs._replace(q=inputs.q[:, :, :2], k=inputs.k[:, :, 1:3], beta=2 * inputs.log_decay.exp())
    assert max(fla(errors, inputs, Recurrence(0.3, normalize_qk=True))) < MAX_ERROR


@runs_package
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("previous", [None, [0, 9]])  # the second sample's state is of another document than its tokens
def test_documents_and_states_equal_the_definition(fla: Call, kind: str, previous: list[int] | None) -> None:
    documents = torch.tensor([[0] * 2 + [1] + [2] * 63 + [3] * 5 + [4], [5] * 70 + [6] * 2])
    previous_B = None if previous is None else torch.tensor(previous)
    assert max(fla(errors, inputs_of(kind, 72, 2, 1, 8, 12), Recurrence(0.3, True, documents, previous_B))) < MAX_ERROR


def changed_by_another_document_in_the_package(kind: str) -> tuple[bool, bool]:
    set_kernel_options("auto", "auto", "fla")
    with mock.patch("test_recurrence_kernels.runs_triton", return_value=True):
        return changed_by_another_document(kind)


@runs_package
@pytest.mark.parametrize("kind", KINDS)
def test_another_document_changes_no_bit(fla: Call, kind: str) -> None:
    assert fla(changed_by_another_document_in_the_package, kind) == (False, True)


@runs_package
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_rounded_in_products(fla: Call, kind: str) -> None:
    inputs = inputs_of(kind, 70, 1, 2, 20, 18)
    assert 1e-5 < max(fla(errors, inputs, NORMALIZED, torch.float16)) < 2**-9


@runs_package
@pytest.mark.parametrize("kind", KINDS)
def test_running_sums_lose_weak_decays_after_strong_ones(fla: Call, kind: str) -> None:
    """The docs state these errors; those of our kernels are below 1e-5 (test_recurrence_kernels.py)."""
    assert max(fla(errors, hard_inputs(kind, "equal keys"), NORMALIZED)) < MAX_ERROR
    strong = fla(errors, hard_inputs(kind, "strong decays"), NORMALIZED)
    assert 1e-3 < strong.pop(5) < 1e-2 and max(strong) < MAX_ERROR  # the gradient of the decays
    assert 1e-5 < max(fla(errors, hard_inputs(kind, "weak after strong decays"), NORMALIZED)) < 1e-2


def losses_and_norms(kernel: str) -> list[float]:
    """Return loss and gradient norm of two steps, each with one call for the layer G and one for K."""
    run = run_from(f"{PATTERN} {DOCUMENT_FLAGS} --linear-attention-kernel {kernel}")
    with mock.patch.object(delta_rule_fla, "delta_rule", side_effect=delta_rule_fla.delta_rule) as package:
        results = [train_step(run) for _ in range(2)]
    close_runs()
    assert package.call_count == (4 if kernel == "fla" else 0)
    return [number for result in results for number in (result.loss, result.grad_norm)]


@runs_package
def test_run_with_the_package_is_that_of_our_kernels(fla: Call) -> None:
    torch.testing.assert_close(fla(losses_and_norms, "fla"), fla(losses_and_norms, "auto"), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "version,device,error,message",
    [
        (
            "0.6.0",
            "cpu",
            KernelError,
            "linear_attention_kernel=fla needs a CUDA device; use --linear-attention-kernel auto",
        ),
        (
            None,
            "cuda",
            MissingPackageError,
            "needs the package fla-core; pip install fla-core (or megalite[fla]), or use --linear-attention-kernel",
        ),
        ("0.5.2", "cuda", KernelError, "needs fla-core 0.6, and 0.5.2 is installed; upgrade it, or use"),
    ],
)
def test_missing_packages_and_devices_are_refused(
    version: str | None, device: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "fla_version", lambda: version)
    set_kernel_options("auto", "auto", "fla")
    with pytest.raises(error, match=re.escape(message)):
        runs_fla(device)
    set_kernel_options("auto", "auto")
    assert not runs_fla(device)


def test_package_that_does_not_work_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "fla_version", lambda: "0.6.1")
    monkeypatch.setattr(dispatch, "import_fla", lambda: [][1])
    set_kernel_options("auto", "auto", "fla")
    with pytest.raises(
        KernelError, match=r"fla-core 0.6.1 cannot be imported \(list index out of range\); use --linear"
    ):
        runs_fla("cuda")
    monkeypatch.setattr(dispatch, "import_fla", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, version, works in (
        ((9, 0), "3.3.1", True),
        ((9, 0), "3.4.0", False),
        ((9, 0), "3.7.0", False),
        ((9, 0), "3.7.1", True),
        ((10, 0), "3.6.0", True),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)  # noqa: B023
        monkeypatch.setattr(dispatch, "triton_version", lambda: version)  # noqa: B023
        runs_fla.cache_clear()
        if works:
            assert runs_fla("cuda")
            continue
        with pytest.raises(
            KernelError, match=f"no gradients on this GPU with Triton {version}; upgrade to Triton 3.7.1"
        ):
            runs_fla("cuda")


def test_preflight_refuses_a_cpu_only_for_layers_of_the_option() -> None:
    config = config_from(f"{PATTERN} --linear-attention-kernel fla")
    with pytest.raises(
        SetupError, match="^linear_attention_kernel=fla needs a CUDA device; use --linear-attention-kernel auto$"
    ):
        check_machine(make_run_plan(config, 1, 31), "cpu", RankInfo())
    config = config_from(f"{PATTERN} --linear-attention-kernel fla --hybrid-layer-pattern M-*-")
    check_machine(make_run_plan(config, 1, 31), "cpu", RankInfo())


def test_option_selects_recurrences_with_a_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "import_fla", lambda: None)
    monkeypatch.setattr(dispatch, "fla_version", lambda: "0.6.1")
    set_kernel_options("auto", "auto", "fla")
    on_gpu = mock.patch.object(delta_rule_fla, "runs_fla", lambda device_type: runs_fla("cuda"))
    with on_gpu:
        inputs = cast(inputs_of("kda", 3), torch.float32)
        assert delta_rule_fla.supports(inputs) and not delta_rule_fla.supports(inputs._replace(beta=None))
        with pytest.raises(KernelError, match="computes at most in fp32, not in fp64; use --linear-"):
            delta_rule_fla.supports(inputs_of("gdn", 3))
    assert not delta_rule_fla.supports(cast(inputs, torch.float32, "meta"))  # a plan has the launches of our kernels


def test_plan_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "import_fla", lambda: None)
    monkeypatch.setattr(dispatch, "fla_version", lambda: "0.6.1")
    monkeypatch.setattr("megalite.training.logging.plan_summary.fla_version", lambda: "0.6.1")
    config = config_from(f"{PATTERN} --linear-attention-kernel fla --kernels torch")
    set_kernel_options("torch", "auto", "fla")
    sources = build_datasets(config.data, config.model.seq_length, config.train.seed, config.train.eval_iters)
    lines = " ".join(format_plan(make_run_plan(config, 1, 31), sources, 1, device_type="cuda").split())
    assert "of 4 layers, in flash-linear-attention 0.6.1; Mamba-2 in torch" in lines
