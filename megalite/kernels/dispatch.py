"""The choice of each kernel's implementation: Triton, or its plain torch twin.

    --kernels auto     Triton on CUDA where it is installed, torch on CPU (the default)
    --kernels triton   Triton everywhere; on CPU that needs TRITON_INTERPRET=1, which runs kernels in numpy
    --kernels torch    the twins everywhere

--attention-kernel chooses among implementations of attention (kernels/attention.py), and --linear-attention-kernel fla
takes the kernels of flash-linear-attention for recurrences by the delta rule (kernels/delta_rule_fla.py).

A CPU without instructions for half precision multiplies half-precision matrices in fp32 (`upcasts`,
kernels/matmul.py). The choice depends only on the CPU model, so all ranks on one model agree; a run that is resumed on
another model differs in rounding.

The setup of a run passes its options to `set_kernel_options`. The environment variable MEGALITE_KERNELS overrides them,
and serves programs without options. It is read once, so kernels never change within a run. Triton is imported when the
first kernel is launched, because torch for CPU does not include it. Rejected: importing it at the top of every kernel
file, which costs 0.3 s at each start on CPU and needs a stand-in for `triton.jit` if it is not installed.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from megalite.common import environment
from megalite.common.optional_packages import MissingPackageError, missing_package_message
from megalite.config import env_overrides

Fn = Callable[..., Any]
T = TypeVar("T")
P = ParamSpec("P")
# A CPU multiplies in a dtype if it has one of these capabilities (names of torch.cpu.get_capabilities).
CPU_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
# ONEDNN_MAX_CPU_ISA values that exclude the instructions for a dtype
ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
ISA_WITHOUT = {torch.bfloat16: ISA_WITHOUT_BF16, torch.float16: (*ISA_WITHOUT_BF16, "AVX512_CORE_BF16")}
# Products of up to this many rows are bound by reading the matrix, which a conversion to fp32 would read twice.
FEW_ROWS = 2
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_TILE_COLUMNS = 32768  # columns of a row that one program can hold in registers
MIN_FLA_VERSION = (0, 6)  # of fla-core: the first one that was tested
META_NUM_SMS = 132  # multiprocessors of the GPU that the meta device stands for (an H100)

# modules that have Triton kernels; the plan summary prints them
TRITON_KERNELS = ("norms", "rope", "swiglu", "geglu", "bias_gelu", "dropout", "cross_entropy", "adamw", "grad_norm")
TRITON_KERNELS += (
    "flash_attention",
    "grouped_matmul",
    "gated_matmul",
    "permute",
    "gated_norm",
    "short_conv",
    "recurrence_terms",
    "recurrence_scan",
)


class KernelError(Exception):
    """The requested kernels cannot run on this machine; the message says what to set or install."""


class LaunchObserver(Protocol):
    """The observer of kernel launches in a planned run.

    The meta device stands for a device of type `device_type`, and no kernel is launched.
    """

    device_type: str

    def on_launch(self, kernel: "Kernel", args: tuple[Any, ...]) -> None:
        """Observe a launch that is skipped."""
        ...

    def num_events(self) -> int:
        """Return the number of events so far, for `on_repeat`."""
        ...

    def on_repeat(self, first_event: int, times: int) -> None:
        """Observe that the events from `first_event` on happen again, `times` times."""
        ...

    def run_repeatable(self, fn: Fn, args: tuple[Any, ...]) -> Any:
        """Return what the repeatable function `fn` returns, which need not run again."""
        ...


_observer: ContextVar[LaunchObserver | None] = ContextVar("launch_observer", default=None)
_options = {"kernels": "auto", "attention_kernel": "auto", "linear_attention_kernel": "auto"}


@contextlib.contextmanager
def context_value(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable within a with block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# observe_launches(observer): context manager in which `observer` gets the launches of kernels on the meta device, which
# only allocate their outputs
observe_launches = functools.partial(context_value, _observer)


def representatives(items: Sequence[T], kind: Callable[[T], Hashable]) -> Iterator[T]:
    """Yield the items; within `observe_launches`, only the first two of each kind.

    All items of a kind must have the same work and memory, but for the first one. The observer counts the events of the
    second for the others, too, so that the time for planning does not grow with their number.
    """
    observer = _observer.get()
    numbers = Counter(map(kind, items))
    seen: Counter[Hashable] = Counter()
    for item in items:
        key = kind(item)
        seen[key] += 1
        if observer is None or seen[key] == 1:
            yield item
        elif seen[key] == 2:
            first_event = observer.num_events()
            yield item
            observer.on_repeat(first_event, numbers[key] - 2)


def repeatable(fn: Callable[P, T]) -> Callable[P, T]:
    """Mark a function whose work and memory depend only on the shapes of tensors and the values of other arguments.

    Within `observe_launches`, the observer may replay a run of the function with arguments of the same shapes. The
    function must not write into its arguments, and autograd must not record it. Arguments are positional.
    """

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        observer = _observer.get()
        if observer is None or kwargs:
            return fn(*args, **kwargs)
        return observer.run_repeatable(fn, args)

    return run


def device_type(device: torch.device) -> str:
    """Return the device type by which kernels and sizes are chosen.

    For the meta device within `observe_launches`, this is the type of the device that it stands for.
    """
    observer = _observer.get() if device.type == "meta" else None
    return device.type if observer is None else observer.device_type


def size_for_device(sizes: Mapping[str, int], device: torch.device) -> int:
    """Return the device's entry of a table of sizes, or the CPU's entry if the table has none for it."""
    return sizes.get(device_type(device), sizes["cpu"])


def set_kernel_options(kernels: str, attention_kernel: str, linear_attention_kernel: str = "auto") -> None:
    """Set the options --kernels, --attention-kernel and --linear-attention-kernel for the process.

    This is the only process-wide setting: otherwise dozens of small functions that are independent of a run would need
    it as an argument. Every setup of a run sets it.

    Raises:
        KernelError: if an environment variable that overrides an option has an invalid value.
    """
    _options.update(kernels=kernels, attention_kernel=attention_kernel, linear_attention_kernel=linear_attention_kernel)
    kernel_option.cache_clear()
    runs_triton.cache_clear()
    runs_fla.cache_clear()
    for option in _options:
        kernel_option(option)


@functools.cache
def kernel_option(option: str) -> str:
    """Return the value of an option; its environment variable, if it has one, is read once and overrides it.

    Raises:
        KernelError: if the variable has an invalid value.
    """
    if option not in env_overrides.OVERRIDES:
        return _options[option]
    try:
        return env_overrides.env_override(option, _options[option])
    except ValueError as error:
        raise KernelError(str(error)) from None


def describe_option() -> str:
    """Return the setting and its origin, such as "kernels=triton" or "MEGALITE_KERNELS=triton"."""
    return f"{env_overrides.setting_name('kernels')}={kernel_option('kernels')}"


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def triton_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter; Triton decides this when it is imported."""
    return environment.getenv("TRITON_INTERPRET") == "1"


@functools.cache
def runs_triton(device_type: str) -> bool:
    """Return whether Triton kernels run on devices of this type.

    Raises:
        MissingPackageError: if the kernels option is "triton" and Triton is not installed.
        KernelError: if the kernels option is "triton" and kernels cannot run on the CPU.
    """
    requested = kernel_option("kernels")
    if requested == "torch" or device_type not in ("cpu", "cuda"):
        return False
    if requested == "auto":
        return device_type == "cuda" and triton_installed() and not triton_interpreted()
    if not triton_installed():
        raise MissingPackageError(missing_package_message(describe_option(), "triton") + ", or use torch")
    if device_type == "cpu" and not triton_interpreted():
        raise KernelError(f"{describe_option()} on CPU needs TRITON_INTERPRET=1 (slow, for tests); or use torch")
    return True


def fla_version() -> str | None:
    """Return the version of flash-linear-attention's kernels; None: they are not installed."""
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def runs_fla(device_type: str) -> bool:
    """Return whether the kernels of flash-linear-attention run on devices of this type.

    Raises:
        KernelError: if they are requested, and this is a CPU, or the package is too old or does not work.
        MissingPackageError: if they are requested and not installed.
    """
    setting = f"linear_attention_kernel={kernel_option('linear_attention_kernel')}"
    remedy = "use --linear-attention-kernel auto"
    if kernel_option("linear_attention_kernel") != "fla" or device_type == "meta":
        return False
    if device_type != "cuda":
        raise KernelError(f"{setting} needs a CUDA device; {remedy}")
    version = fla_version()
    if version is None:
        raise MissingPackageError(f"{missing_package_message(setting, 'fla-core')}, or {remedy}")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_FLA_VERSION:
        minimum = ".".join(map(str, MIN_FLA_VERSION))
        raise KernelError(f"{setting} needs fla-core {minimum}, and {version} is installed; upgrade it, or {remedy}")
    try:
        import_fla()
    except Exception as error:  # what an import runs may fail in any way
        raise KernelError(f"{setting}: fla-core {version} cannot be imported ({error}); {remedy}") from None
    if fla_refuses_gradients():
        raise KernelError(
            f"{setting}: fla-core {version} computes no gradients on this GPU with Triton {triton_version()}; "
            f"upgrade to Triton 3.7.1, install tilelang, or {remedy}"
        )
    return True


def import_fla() -> None:
    """Import the package's kernels; raises any error."""
    import fla.ops.gated_delta_rule
    import fla.ops.kda  # noqa: F401


def triton_version() -> str:
    """Return the version of Triton that is installed."""
    return importlib.metadata.version("triton")


def fla_refuses_gradients() -> bool:
    """Return whether flash-linear-attention raises an error in backward of a gated delta net (fla#640).

    With these versions of Triton its gradients are wrong on GPUs of compute capability 9.0.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    is_affected = (3, 4) <= tuple(map(int, re.findall(r"\d+", triton_version())[:3])) < (3, 7, 1)
    return is_affected and importlib.util.find_spec("tilelang") is None


def use_triton(x: Tensor, columns: int = 1) -> bool:
    """Return whether to run the Triton kernel for `x`, and not its torch twin.

    torch.compile (models/torch_compile.py) always traces the torch twin, and fuses it with the surrounding operations.

    Args:
        x: an input of the kernel.
        columns: the columns of a row that one program must hold.
    """
    if torch.compiler.is_compiling():
        return False
    runs = device_type(x.device) == "cuda" if x.is_meta else runs_triton(x.device.type)
    return runs and x.dtype in DTYPES and 0 < columns <= MAX_TILE_COLUMNS and x.numel() > 0


def describe_kernels(device_type: str) -> str:
    """Return one line for the plan summary; raises the errors of `runs_triton`."""
    if not runs_triton(device_type):
        missing = kernel_option("kernels") == "auto" and device_type == "cuda" and not triton_installed()
        reason = "triton is not installed" if missing else describe_option()
        return f"torch ({reason})"
    runtime = "triton's interpreter" if triton_interpreted() else "triton"
    return f"{runtime}: {', '.join(TRITON_KERNELS)}"


class Kernel:
    """A Triton kernel that is passed to `triton.jit` on its first launch.

    `kernel[grid](...)` launches it, as with the object that `triton.jit` returns; a launch that needs more registers or
    shared memory than the GPU has raises KernelError. The kernel's module imports `triton.language as tl` under
    TYPE_CHECKING only. The jitted function gets the module's globals, with the real `tl`, and with the jitted functions
    in place of the Kernel objects that it calls.

    Three functions of the launch's arguments describe its cost, for the planner:

    flops             FLOPs, for kernels whose matmuls depend on a mask
    matmul_shape      (rows, columns, depth) of a plain matmul, followed by the number of groups of rows that have a
                      separate matrix each, if there are several
    epilogue_tensors  the tensors that such a matmul reads and writes in addition to its operands and result

    A kernel with neither `flops` nor `matmul_shape` counts as having no matmul FLOPs.
    """

    def __init__(
        self, fn: Fn, options: dict[str, Any], flops: Fn | None, matmul_shape: Fn | None, epilogue_tensors: Fn | None
    ):
        self.fn = fn
        self.options = options
        self.flops = flops
        self.matmul_shape = matmul_shape
        self.epilogue_tensors = epilogue_tensors
        self.jitted: Any = None
        self.launch_errors: tuple[type[Exception], ...] = ()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        if (observer := _observer.get()) is not None:
            return lambda *args, **_: observer.on_launch(self, args)
        launch = self.compiled()[grid]

        def run(*args: Any, **options: Any) -> None:
            try:
                launch(*args, **options)
            except self.launch_errors as error:
                name = f"{self.fn.__module__.rsplit('.', 1)[-1]}{self.fn.__name__}"
                cause = " ".join(str(error).split("Reducing block")[0].split())
                raise KernelError(f"the kernel {name} cannot run on this GPU ({cause}); use --kernels torch") from error

        return run

    def compiled(self) -> Any:
        """Return the jitted kernel; the first call imports Triton."""
        if self.jitted is None:
            # Triton 3.9 does this by default, with a warning; 3.10 will not.
            environment.set_env_defaults(TRITON_DEFAULT_FP_FUSION="1")
            import triton
            import triton.language
            from triton.runtime.errors import OutOfResources, PTXASError

            self.launch_errors = (OutOfResources, PTXASError)
            names = self.fn.__globals__ | {"tl": triton.language}
            fn = functools.update_wrapper(types.FunctionType(self.fn.__code__, names), self.fn)
            self.jitted = triton.jit(fn, **self.options)
            # A kernel may call other kernels, and Triton accepts only jitted functions.
            names.update({name: value.compiled() for name, value in names.items() if isinstance(value, Kernel)})
        return self.jitted


def kernel(
    fn: Fn | None = None,
    *,
    flops: Fn | None = None,
    matmul_shape: Fn | None = None,
    epilogue_tensors: Fn | None = None,
    **options: Any,
) -> Any:
    """Decorate a Triton kernel; `options` are passed to `triton.jit`, the other arguments are described in `Kernel`."""
    if fn is None:
        return functools.partial(
            kernel, flops=flops, matmul_shape=matmul_shape, epilogue_tensors=epilogue_tensors, **options
        )
    return Kernel(fn, options, flops, matmul_shape, epilogue_tensors)


@dataclass(frozen=True)
class TileConfig:
    """The tile of one program: block_m x block_n elements (block_n is a power of two), and its number of warps.

    programs_per_sm  programs per multiprocessor, for kernels whose programs loop over many tiles
    num_stages       pipeline stages of that loop: the number of successive tiles whose loads are in flight
    """

    block_m: int
    block_n: int
    num_warps: int
    programs_per_sm: int = 1
    num_stages: int = 1


def tile_for(table: Sequence[Sequence[int]], columns: int) -> TileConfig:
    """Return the tile that holds full rows of `columns` elements.

    Args:
        table: (max width, block_m, num_warps[, programs_per_sm, num_stages]), in ascending order of the width.
        columns: elements of a row.

    Raises:
        ValueError: if `columns` is above the table's largest width.

    >>> tile_for(((128, 8, 4), (4096, 1, 8)), 1000)
    TileConfig(block_m=1, block_n=1024, num_warps=8, programs_per_sm=1, num_stages=1)
    """
    width = power_of_two(columns)
    for max_width, block_m, num_warps, *loop in table:
        if width <= max_width:
            return TileConfig(block_m, width, num_warps, *loop)
    raise ValueError(f"columns={columns} is above the table's {table[-1][0]}; use the torch implementation")


def fit_tile(tile: TileConfig, columns: int) -> TileConfig:
    """Return a tile with the same number of elements for rows of `columns`: several rows if they are narrower.

    >>> fit_tile(TileConfig(1, 2048, 4), 500)
    TileConfig(block_m=4, block_n=512, num_warps=4, programs_per_sm=1, num_stages=1)
    """
    block_n = min(tile.block_n, power_of_two(columns))
    return replace(tile, block_m=tile.block_m * tile.block_n // block_n, block_n=block_n)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU.

    On CPU, it is a small number, so that the interpreter runs programs that loop over several tiles.
    """
    if device.type == "meta":
        return META_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def sm_major(device: torch.device) -> int:
    """Return the major compute capability of a GPU; on CPU, the one that the interpreter stands for."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def matmul_unit(x: Tensor) -> str:
    """Return the hardware unit that multiplies `x`, which is a key of the tables of tiles.

    "wgmma" and "tcgen05" are the tensor cores of compute capability 9 and 10, which read operands from shared memory.
    "mma" stands for the tensor cores of all others, such as 8 and 12, which need operands in registers; most of these
    GPUs have 99 KiB of shared memory per block. "fp32" is multiplied without tensor cores.
    """
    return "fp32" if x.dtype == torch.float32 else {9: "wgmma", 10: "tcgen05"}.get(sm_major(x.device), "mma")


@functools.cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch has fast matrix products in this half-precision dtype on this CPU.

    It has if oneDNN may use the CPU's instructions for them. Otherwise oneDNN or torch converts element by element,
    which takes 2 to 40 times as long as fp32 (torch 2.13).
    """
    limit = (environment.getenv("ONEDNN_MAX_CPU_ISA") or environment.getenv("DNNL_MAX_CPU_ISA")).upper()
    if limit in ISA_WITHOUT[dtype] or not torch.backends.mkldnn.is_available():
        return False
    return any(torch.cpu.get_capabilities().get(name, False) for name in CPU_INSTRUCTIONS[dtype])


def upcasts(x: Tensor, rows: int | None = None) -> bool:
    """Return whether a matrix product of `x` is computed in fp32 and then rounded.

    This is so for half precision on a CPU that has no instructions for it.

    Args:
        x: an operand.
        rows: the rows of the product; FEW_ROWS or fewer are not worth the conversion. None: many.
    """
    if x.device.type != "cpu" or x.dtype not in CPU_INSTRUCTIONS or (rows is not None and rows <= FEW_ROWS):
        return False
    return not cpu_multiplies(x.dtype)


def upcast_dtypes(device_type: str) -> list[torch.dtype]:
    """Return the dtypes whose products are computed in fp32 on devices of this type (`upcasts`)."""
    return [dtype for dtype in CPU_INSTRUCTIONS if device_type == "cpu" and not cpu_multiplies(dtype)]


def upcast_for_interpreter(x: Tensor) -> bool:
    """Return whether a kernel must multiply `x` in fp32: bf16 in the interpreter, which reads it as integers (3.9)."""
    return triton_interpreted() and x.dtype == torch.bfloat16


def accum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which reductions over `x` are computed: fp64 for fp64, otherwise fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def as_2d(x: Tensor) -> Tensor:
    """Return x [..., D] as [N, D] with unit stride along D; a view if the layout allows it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def unit_stride(x: Tensor) -> Tensor:
    """Return x with unit stride along the last dim; a copy if it has another."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
