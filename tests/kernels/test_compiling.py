"""Every kernel compiles for every GPU, with 16-byte accesses and, at usual sizes, within registers and shared memory.

This needs no GPU: Triton's compiler and assembler run on any machine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import OPS, results
from compiling import GPUS, Launch, build, cache_dir, record_launches
from launches import WIDTHS, Work, activations, all_work, attention, experts, gated, norms, permute
from machine_code import code_of
from pairwise import cover, nightly_except

from megalite.kernels import dispatch, flash_attention
from megalite.kernels.dispatch import kernel

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
TYPE_CHECKING = False
if TYPE_CHECKING:
    import triton.language as tl


@pytest.fixture(autouse=True)
def compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache_dir()))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch.set_kernel_options("auto", "auto")  # a run of another test in this process may have chosen


WIDEST_IN_REGISTERS = 8192


def known_spill(launch: Launch) -> bool:
    """Return whether a launch is known to spill registers.

    A norm's program holds a complete row, which above 8192 columns exceeds the registers of any number of warps; the
    backward of a gated norm of 8192 columns spills up to 88 bytes. Attention's tiles for 9.0 were the fastest on such a
    GPU, spilling or not (docs/experiments.md). Its forward with dropout spills 16 bytes on 12.0, because it hashes every
    score. Its backward of capped scores spills 8 bytes on 9.0 and 10.0 for heads of 256 channels. Of a recurrence, the
    scores of a chunk spill up to 40 bytes on 12.0, and the backward of its scan with a decay per channel 16 on 8.9. With
    inputs in fp32 the gradients of its terms spill 80 bytes on 12.0, its scan 264 on 9.0, and dscores 8 on 8.0.
    """
    spilling = ("recurrence_terms.head_terms", "recurrence_terms.head_decay_grads", "recurrence_scan.scan_backward")
    if launch.name in spilling:
        return True
    in_fp32 = ("head_terms_backward", "scan", "score_grads")
    if launch.name.startswith("recurrence_") and launch.name.split(".")[1] in in_fp32:
        return not {"*bf16", "*fp16"} & set(launch.types.values())
    if launch.name in ("flash_attention.forward", "flash_attention.backward_kv"):
        table = flash_attention.FORWARD_TILES if launch.name.endswith("forward") else flash_attention.BACKWARD_KV_TILES
        tile = [launch.constants["BLOCK_M"], launch.block_n]
        dropout = launch.constants["THRESHOLD"] > 0 and launch.name.endswith("forward")
        narrow = max(launch.constants["BLOCK_D"], launch.constants["BLOCK_DV"]) <= 128
        if not narrow:
            capped = launch.constants["SOFTCAP"] > 0 and launch.name.endswith("backward_kv")
            return capped and tile == table["wgmma wide"][:2]
        return tile == table["wgmma"][:2] or (dropout and tile == table["mma"][:2])
    if launch.name == "gated_norm.backward":
        return launch.block_n >= WIDEST_IN_REGISTERS
    return launch.name.startswith(("norms.", "gated_norm.")) and launch.block_n > WIDEST_IN_REGISTERS


def problems(work: Work, capability: int) -> list[str]:
    builds = [build(launch, capability) for launch in record_launches(work.run, capability)]
    return [
        text for built in builds for text in built.problems() if "spilled" not in text or not known_spill(built.launch)
    ]


# with each commit: attention with all features at once, attention with a sink, and changed kernels
COMPLETE = ("attention with dropout, by document in a window", "attention with a sink")
BUILT = [name for name in OPS if not name.startswith("attention") or name in COMPLETE]


@pytest.mark.parametrize("name", nightly_except(list(OPS), BUILT, str, guards=("megalite/kernels",)))
def test_every_kernel_builds(name: str) -> None:
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in OPS[name].cases[-1]()]
    launches = record_launches(lambda: results(OPS[name].run, inputs, "contiguous"))
    assert launches and all(build(launch, 90).cubin for launch in launches)


@pytest.mark.parametrize("capability", GPUS)
def test_norms_fit_every_gpu(capability: int) -> None:
    assert [text for work in norms(4096, torch.bfloat16) for text in problems(work, capability)] == []


def test_norms_activations_and_experts_use_16_byte_accesses() -> None:
    works = (*norms(4096, torch.bfloat16), *activations(4096, torch.bfloat16))
    for work in (
        *works,
        *(make_work(768, torch.bfloat16) for make_work in (experts, gated)),
        permute(4096, torch.bfloat16),
    ):
        for launch in record_launches(work.run):
            widths = code_of(build(launch, 90)).narrow
            # permitted: a norm's statistics per row, a sample id per row for dropout, a column of a gradient; an
            # expert's offsets, row indices, probabilities and biases (narrow stores of the 128 elements of u, a and du
            # that a thread writes would be 64 accesses); and the slot of each of 8 assignments
            max_narrow = {
                "norms": 2,
                "row_sum": 1,
                "dropout": 2,
                "grouped_matmul": 8,
                "gated_matmul": 48,
                "permute": 8,
            }.get(launch.name.split(".")[0], 0)
            assert sum(widths.values()) <= max_narrow, f"{launch.name}: {dict(widths)}"


@pytest.mark.parametrize("head_size", [64, 128])
def test_attention_fits_and_uses_the_tensor_cores(head_size: int) -> None:
    work = attention(head_size, torch.bfloat16)
    assert problems(work, 90) == []
    assert all("wgmma" in build(launch, 90).ptx for launch in record_launches(work.run))


def work_on_gpus() -> list[Any]:
    """Return each work on each GPU.

    With each commit run each kernel once on each GPU, and once in fp32 and in bf16, whose code is as large as that of
    fp16, and changed kernels.
    """
    rows = [(work, capability) for work in all_work() for capability in GPUS]
    # 8.9 has the tiles of 8.0 and the shared memory of 12.0; 10.0 has its own tiles only for attention
    distinct = [row for row in rows if row[1] != 89 and (row[1] != 100 or row[0].op.endswith("attention"))]
    distinct = [row for row in distinct if row[0].dtype != torch.float16]
    often = cover(distinct, lambda row: {"op": row[0].kind, "dtype": str(row[0].dtype), "gpu": row[1]})
    directory = "megalite/kernels"

    def param(row: tuple[Work, int]) -> Any:
        file = "norms" if row[0].op in ("rms_norm", "layer_norm") else row[0].op
        file = "recurrence_scan" if file.startswith("recurrence") else file
        file = "flash_attention" if file.endswith("attention") else file
        file = {"swiglu": "activations/swiglu", "geglu": "activations/geglu"}.get(file, file)
        marks = [] if row in often else [pytest.mark.nightly(guards=(f"{directory}/{file}.py",))]
        if row[0].op.endswith("attention"):
            marks.append(pytest.mark.timeout(900))  # it compiles up to 16 kernels, for minutes on a machine under load
        return pytest.param(*row, id=f"{row[0].name}-{row[1]}", marks=marks)

    return [param(row) for row in rows]


@pytest.mark.parametrize("work,capability", work_on_gpus())
def test_every_tile_fits_every_gpu(work: Work, capability: int) -> None:
    assert problems(work, capability) == []


def test_tile_tables_have_every_width() -> None:
    assert max(WIDTHS) == 32768 and {work.size for work in all_work() if work.op == "layer_norm"} == set(WIDTHS)


@pytest.mark.parametrize("width", [768, 1408])
def test_experts_fit_and_use_the_tensor_cores(width: int) -> None:
    for work in (experts(width, torch.bfloat16), gated(width, torch.bfloat16)):
        assert problems(work, 90) == [] and problems(work, 100) == []
        for capability, unit in ((90, "wgmma"), (100, "tcgen05")):
            assert all(unit in build(launch, capability).ptx for launch in record_launches(work.run, capability))


# --- planted defects that the checks must report


def planted(launch: Launch, **changes: int) -> Launch:
    options = {k: changes.pop(k, v) for k, v in launch.options.items()}
    return dataclasses.replace(launch, constants=launch.constants | changes, options=options)


def test_spilling_tile_is_detected() -> None:
    """Compile the kernel with a quarter of the warps."""
    (work, _) = norms(8192, torch.bfloat16)
    launch = next(launch for launch in record_launches(work.run) if launch.name == "norms.backward")
    built = build(planted(launch, num_warps=2), 90)
    assert any("spilled" in text for text in built.problems())


def test_tile_over_the_shared_memory_of_one_gpu_is_detected() -> None:
    """A tile that fits on an H100 does not fit on a workstation GPU."""
    launch = next(
        launch for launch in record_launches(attention(128, torch.bfloat16).run) if launch.name.endswith("forward")
    )
    built = build(planted(launch, num_stages=4), 120)
    assert any("bytes of shared memory, the GPU has 101376" in text for text in built.problems())
    assert not any("shared" in text for text in dataclasses.replace(built, gpu=GPUS[90]).problems())


@kernel
def _copy(x_ptr, y_ptr, n_elements, STEP: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE) * STEP
    mask = offs < n_elements
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=0.0), mask=mask)


def test_kernel_without_wide_accesses_is_detected() -> None:
    x = torch.zeros(4096, dtype=torch.bfloat16)

    def run(step: int) -> dict[int, int]:
        (launch,) = record_launches(lambda: _copy[(4,)](x, x, 4096, step, 1024, num_warps=4))
        return dict(code_of(build(launch, 90)).narrow)

    assert run(1) == {} and set(run(2)) == {2}


def test_tiles_are_chosen_by_compute_capability() -> None:
    tiles = {}
    for capability in GPUS:
        launch = record_launches(attention(128, torch.bfloat16).run, capability)[0]
        tiles[capability] = [launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]]
    table = {unit: tile[:2] for unit, tile in flash_attention.FORWARD_TILES.items()}
    assert tiles == {80: table["mma"], 89: table["mma"], 90: table["wgmma"], 100: table["tcgen05"], 120: table["mma"]}
