"""Chooses the implementation of each kernel: Triton, or its plain torch twin.

    --kernels auto     Triton on CUDA where it is installed, torch on CPU (the default)
    --kernels triton   Triton everywhere; on CPU that needs TRITON_INTERPRET=1, which runs kernels in numpy
    --kernels torch    the twins everywhere

Matrix products of half precision on a CPU without instructions for it are made in fp32 (`upcasts`, kernels/matmul.py).
The CPU decides, so all ranks on one kind of CPU agree, and a run that is resumed on another kind differs in rounding.

The setup of a run passes its option to `choose`; the variable MEGALITE_KERNELS wins over it, and serves programs
without options. It is read once, so kernels never change within a run. Triton is imported when the first kernel is
launched; torch for CPU comes without it. Rejected: importing it at the top of every kernel file, which costs 0.3 s at
each start on CPU and needs a stand-in for `triton.jit` where it is missing.
"""

import contextlib
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.common.optional_packages import MissingPackageError, missing_package_message
from megalite.config import environment

Fn = Callable[..., Any]
# what a CPU that multiplies in a dtype has one of, in torch's words, and the instruction sets before it, in oneDNN's
CPU_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
ISA_WITHOUT = {torch.bfloat16: ISA_WITHOUT_BF16, torch.float16: (*ISA_WITHOUT_BF16, "AVX512_CORE_BF16")}
FEW_ROWS = 2  # of a product: below, reading a matrix is all that it takes, and a conversion would read it twice
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_TILE_COLUMNS = 32768  # columns of a row that one program can hold in registers
META_NUM_SMS = 132  # multiprocessors of the card that the meta device stands for: an H100's

# The modules that have Triton kernels; the plan at start prints them.
TRITON_KERNELS = ("norms", "rope", "swiglu", "bias_gelu", "dropout", "cross_entropy", "adamw", "grad_norm")
TRITON_KERNELS += ("flash_attention", "grouped_matmul", "gated_matmul", "permute")


class KernelError(Exception):
    """The kernels asked for cannot run here; the text says what to set or install."""


class LaunchObserver(Protocol):
    """Observer of a planned run: the meta device stands for one of `device_type`, and no kernel is launched."""

    device_type: str

    def on_launch(self, kernel: "Kernel", args: tuple[Any, ...]) -> None:
        """Called in place of each launch."""
        ...


_observer: ContextVar[LaunchObserver | None] = ContextVar("listener", default=None)
_options = {"kernels": "auto", "attention_kernel": "auto"}


@contextlib.contextmanager
def context_value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Inside, the variable has the value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# planning(listener): inside, kernels on the meta device only make their outputs, and `listener` gets the launches
observe_launches = functools.partial(context_value, _observer)


def device_type(device: torch.device) -> str:
    """The type that kernels and sizes are chosen by; for the meta device that of the device it stands for."""
    listener = _observer.get() if device.type == "meta" else None
    return device.type if listener is None else listener.device_type


def size_for_device(sizes: Mapping[str, int], device: torch.device) -> int:
    """The entry of a table of sizes; that of the CPU for a device that is not in it."""
    return sizes.get(device_type(device), sizes["cpu"])


def set_kernel_options(kernels: str, attention_kernel: str) -> None:
    """Take the options of these names from here on; raises KernelError. The one setting of the whole process: dozens of
    small functions that know nothing of a run would have to be handed it. Each setup of a run (train/) makes it anew.
    """
    _options.update(kernels=kernels, attention_kernel=attention_kernel)
    kernel_option.cache_clear()
    runs_triton.cache_clear()
    for option in _options:
        kernel_option(option)


@functools.cache
def kernel_option(option: str) -> str:
    """The option, or its variable as it was when first asked for. Raises KernelError."""
    try:
        return environment.env_override(option, _options[option])
    except ValueError as error:
        raise KernelError(str(error)) from None


def describe_option() -> str:
    """The setting and where it is from, as kernels=triton or MEGALITE_KERNELS=triton."""
    return f"{environment.setting_name('kernels')}={kernel_option('kernels')}"


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def triton_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which it decides when it is imported."""
    return environment.getenv("TRITON_INTERPRET") == "1"


@functools.cache
def runs_triton(device_type: str) -> bool:
    """Whether Triton kernels run on such a device. Where they are wanted and cannot, KernelError or MissingPackage."""
    wanted = kernel_option("kernels")
    if wanted == "torch" or device_type not in ("cpu", "cuda"):
        return False
    if wanted == "auto":
        return device_type == "cuda" and triton_installed() and not triton_interpreted()
    if not triton_installed():
        raise MissingPackageError(missing_package_message(describe_option(), "triton") + ", or use torch")
    if device_type == "cpu" and not triton_interpreted():
        raise KernelError(f"{describe_option()} on CPU needs TRITON_INTERPRET=1 (slow, for tests); or use torch")
    return True


def use_triton(x: Tensor, columns: int = 1) -> bool:
    """Whether the kernel for `x` is Triton's; `columns` is what one program must hold of a row. What torch.compile
    traces (models/torch_compile.py) is the torch form, which it fuses with what is around it."""
    if torch.compiler.is_compiling():
        return False
    runs = device_type(x.device) == "cuda" if x.is_meta else runs_triton(x.device.type)
    return runs and x.dtype in DTYPES and 0 < columns <= MAX_TILE_COLUMNS and x.numel() > 0


def describe_kernels(device_type: str) -> str:
    """One line for the plan. Raises as `runs_triton` does."""
    if not runs_triton(device_type):
        missing = kernel_option("kernels") == "auto" and device_type == "cuda" and not triton_installed()
        return f"torch ({'triton is not installed' if missing else describe_option()})"
    how = "triton's interpreter" if triton_interpreted() else "triton"
    return f"{how}: {', '.join(TRITON_KERNELS)}"


class Kernel:
    """A function in Triton's language that is handed to `triton.jit` when it is first launched.

    `kernel[grid](...)` launches it as Triton's own object does; one that a card has no room for raises KernelError. Its
    module names the language under TYPE_CHECKING only (`import triton.language as tl`). What Triton gets sees the names
    of the module, the real language, and in the place of kernels that it calls what Triton made of them. Of a
    launch with these arguments: `flops`, where its matmuls depend on a mask, or `product`, (rows, columns, depth) of a
    plain matmul, and how many groups of its rows have each a matrix of its own; those of other kernels count as none.
    `beside`: what such a matmul reads and writes beside its operands and its result.
    """

    def __init__(
        self, fn: Fn, options: dict[str, Any], flops: Fn | None, matmul_shape: Fn | None, epilogue_tensors: Fn | None
    ):
        self.fn, self.options, self.flops, self.product, self.beside = (
            fn,
            options,
            flops,
            matmul_shape,
            epilogue_tensors,
        )
        self.jitted: Any = None
        self.launch_errors: tuple[type[Exception], ...] = ()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if (listener := _observer.get()) is not None:
            return lambda *args, **_: listener.on_launch(self, args)
        launch = self.compiled()[grid]

        def run(*args: Any, **options: Any) -> None:
            try:
                launch(*args, **options)
            except self.launch_errors as error:
                name = f"{self.fn.__module__.rsplit('.', 1)[-1]}{self.fn.__name__}"
                what = " ".join(str(error).split("Reducing block")[0].split())
                raise KernelError(f"the kernel {name} cannot run on this card ({what}); use --kernels torch") from error

        return run

    def compiled(self) -> Any:
        if self.jitted is None:
            environment.set_env_defaults(
                TRITON_DEFAULT_FP_FUSION="1"
            )  # as 3.9 does unasked, with a warning; 3.10 will not
            import triton
            import triton.language
            from triton.runtime.errors import OutOfResources, PTXASError

            self.launch_errors = (OutOfResources, PTXASError)
            names = self.fn.__globals__ | {"tl": triton.language}
            own = functools.update_wrapper(types.FunctionType(self.fn.__code__, names), self.fn)
            self.jitted = triton.jit(own, **self.options)
            # a kernel may call others, and Triton looks for its own kind
            names.update({name: value.compiled() for name, value in names.items() if isinstance(value, Kernel)})
        return self.jitted


def kernel(
    fn: Fn | None = None,
    *,
    flops: Fn | None = None,
    product: Fn | None = None,
    beside: Fn | None = None,
    **options: Any,
) -> Any:
    """Decorate a Triton kernel; `options` are those of `triton.jit`."""
    if fn is None:
        return functools.partial(kernel, flops=flops, product=product, beside=beside, **options)
    return Kernel(fn, options, flops, product, beside)


@dataclass(frozen=True)
class TileConfig:
    """The tile of one program: rows x columns elements (columns a power of two), and its warps. `programs`: how many
    per multiprocessor where a program walks over many tiles. `stages`: of how many tiles in a row it then has asked for
    the loads."""

    rows: int
    columns: int
    warps: int
    programs: int = 1
    stages: int = 1


def tile_for(table: Sequence[Sequence[int]], columns: int) -> TileConfig:
    """The tile that holds whole rows of `columns`, from a table in rising order of
    (largest width, rows, warps[, programs, stages]).

    >>> tile_for(((128, 8, 4), (4096, 1, 8)), 1000)
    TileSizes(rows=1, columns=1024, warps=8, programs=1, stages=1)
    """
    width = power_of_two(columns)
    for largest, rows, warps, *walk in table:
        if width <= largest:
            return TileConfig(rows, width, warps, *walk)
    raise ValueError(f"columns={columns} is above the table's {table[-1][0]}; use the torch twin")


def fit_tile(block: TileConfig, columns: int) -> TileConfig:
    """The same number of elements for rows of `columns`: where they are narrower than the tile, several of them.

    >>> fit(TileSizes(1, 2048, 4), 500)
    TileSizes(rows=4, columns=512, warps=4, programs=1, stages=1)
    """
    width = min(block.columns, power_of_two(columns))
    return replace(block, rows=block.rows * block.columns // width, columns=width)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a card; on CPU a small number, so that the interpreter sees programs share the work."""
    if device.type == "meta":
        return META_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def sm_major(device: torch.device) -> int:
    """The first number of a card's compute capability; on CPU the one that the interpreter stands for."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def matmul_unit(x: Tensor) -> str:
    """The unit that multiplies: tensor cores of compute capability 9 or 10, which read operands from shared memory,
    those of 8 and 12, which need them in registers (and most such cards have 99 KiB per block), or none, for fp32."""
    return "fp32" if x.dtype == torch.float32 else {9: "wgmma", 10: "tcgen05"}.get(sm_major(x.device), "mma")


@functools.cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has fast matrix products of half precision on this CPU: through oneDNN, with the CPU's instructions
    for them. Without these oneDNN or torch converts element by element: 2 to 40 times the time of fp32 (torch 2.13)."""
    limit = (environment.getenv("ONEDNN_MAX_CPU_ISA") or environment.getenv("DNNL_MAX_CPU_ISA")).upper()
    if limit in ISA_WITHOUT[dtype] or not torch.backends.mkldnn.is_available():
        return False
    return any(torch.cpu.get_capabilities().get(name, False) for name in CPU_INSTRUCTIONS[dtype])


def upcasts(x: Tensor, rows: int | None = None) -> bool:
    """Whether a matrix product of `x`, with so many rows, is made in fp32 and rounded: in half precision on a CPU that
    has no instructions for it."""
    if x.device.type != "cpu" or x.dtype not in CPU_INSTRUCTIONS or (rows is not None and rows <= FEW_ROWS):
        return False
    return not cpu_multiplies(x.dtype)


def upcast_dtypes(device_type: str) -> list[torch.dtype]:
    """The dtypes whose products `upcasts` on such a device."""
    return [dtype for dtype in CPU_INSTRUCTIONS if device_type == "cpu" and not cpu_multiplies(dtype)]


def upcast_for_interpreter(x: Tensor) -> bool:
    """Whether x is multiplied in fp32: bf16 in the interpreter, which takes it for whole numbers (triton 3.9)."""
    return triton_interpreted() and x.dtype == torch.bfloat16


def accum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which reductions over `x` are taken."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def as_2d(x: Tensor) -> Tensor:
    """x [..., D] as [N, D] with unit stride along D: a view where the layout allows it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
