"""The blocks of a checkpoint's files: each is read once, hashed, and its wanted parts are copied to their targets.

One thread reads while another hashes. A file system reads ahead only for a reader that goes in order, so there the
threads take turns, and bytes go straight into a target that is contiguous in both places; behind a URL many blocks are
requested at once. All else goes through one buffer per thread, which stays in the processor's cache: fresh pages for
the bytes of a whole file would cost more time than reading them.
"""

import contextlib
import mmap
import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.format import hashing
from megalite.checkpoint.format.manifest import Manifest
from megalite.checkpoint.format.tensor_file import Place, places
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import OpenFile, storage_of
from megalite.config.console import told
from megalite.parallel.rectangles import inside, intersect, offset_in, rectangles
from megalite.parallel.spec import Box

_DIRECT = 1 << 16  # bytes; a read of less costs more than copying it


@dataclass(frozen=True)
class Want:
    """A stored box, where its bytes are, and the tensors that want a part of it, each with its own box."""

    place: Place
    stored: Box
    targets: tuple[tuple[Tensor, Box], ...]


def read_blocks(
    folder: Location,
    manifest: Manifest,
    todo: Sequence[tuple[str, int]],
    wants: Mapping[tuple[str, int], Sequence[Want]] | None = None,
    tell: str | None = None,
    buffers: list[Tensor] | None = None,
) -> None:
    """Read the blocks `todo`, (file, number) in order, check their hashes, and fill the targets of `wants`. Raises
    CheckpointError with the first wrong block and the tensors in it. `tell`: title of the lines of progress. `buffers`:
    those of earlier calls for this checkpoint, and then of this one."""
    storage = storage_of(folder)
    turn = threading.Lock() if storage.in_order else contextlib.nullcontext()
    files = _Files(folder, Counter(name for name, _ in todo))
    threads = min(storage.readers, len(todo))
    buffers = [] if buffers is None else buffers
    largest = max((min(stamp.block, stamp.size) for stamp in manifest.files.values()), default=0)
    try:  # mmap, since malloc keeps the memory of a thread for later threads
        buffers += [torch.frombuffer(mmap.mmap(-1, largest), dtype=torch.uint8) for _ in range(threads - len(buffers))]
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error})") from None
    free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)

    def work(job: tuple[str, int]) -> None:
        name, buffer = job[0], free.get()
        try:
            block = _Block(folder / name, manifest, job[1], buffer, (wants or {}).get(job, ()), storage.in_order)
            with turn:
                block.read(files.get(name))
            block.check(manifest)
            block.copy()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{folder / name}: cannot be read ({error})") from error
        finally:
            free.put(buffer)
        files.done(name)
        progress.add((block.end - block.begin) / 2**30)

    total = sum(min(s.block, s.size - i * s.block) for name, i in todo for s in [manifest.files[name]]) / 2**30
    progress = told(tell or "", total, "GiB that this rank needs", tell is None)
    with contextlib.closing(files), progress, ThreadPoolExecutor(max(1, threads), "megalite-read") as pool:
        for _ in pool.map(work, todo):  # raises the first error in order; all earlier blocks are done
            pass


class _Files:
    """Files, each open until its last block is read."""

    def __init__(self, folder: Location, left: Counter[str]):
        self._folder, self._left = folder, left
        self._open: dict[str, OpenFile] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenFile:
        with self._lock:
            if name not in self._open:
                path = self._folder / name
                self._open[name] = storage_of(path).open(path)
            return self._open[name]

    def done(self, name: str) -> None:
        with self._lock:
            self._left[name] -= 1
            if not self._left[name]:
                self._open.pop(name).close()

    def close(self) -> None:
        for file in self._open.values():
            file.close()


class _Block:
    """One block of one file. Its bytes go to `views`, which are parts of `buffer` or, if `direct`, of a target."""

    def __init__(
        self, path: Location, manifest: Manifest, number: int, buffer: Tensor, wants: Sequence[Want], direct: bool
    ):
        stamp = manifest.files[path.name]
        self.path, self.number = path, number
        self.begin, self.end = number * stamp.block, min(stamp.size, (number + 1) * stamp.block)
        self._buffer = buffer[: self.end - self.begin]
        self._copies: list[tuple[Tensor, Tensor]] = []
        straight: list[tuple[int, int, memoryview]] = []
        for want in wants:
            self._plan(want, straight if direct else None)
        self.views: list[memoryview] = []
        at, whole = self.begin, memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        for begin, end, view in sorted(straight, key=lambda x: x[0]):
            if begin < at:
                raise ValueError(f"two tensors want bytes {begin} to {at}")
            self.views += [whole[at - self.begin : begin - self.begin], view]
            at = end
        self.views.append(whole[at - self.begin :])

    def _plan(self, want: Want, straight: list[tuple[int, int, memoryview]] | None) -> None:
        """Plan the copies of the block's part of `want`, into `straight` where no copy is needed."""
        item = want.place.dtype.itemsize
        begin, end = max(self.begin, want.place.begin), min(self.end, want.place.end)
        if (begin - want.place.begin) % item or (end - want.place.begin) % item:
            raise ValueError(f"an element lies in two blocks, before byte {begin} or {end}")
        span = range((begin - want.place.begin) // item, (end - want.place.begin) // item)
        for part, where in rectangles(want.stored, span):
            at = begin + where.start * item
            raw = self._buffer[at - self.begin : at - self.begin + len(where) * item]
            for target, box in want.targets:
                both = intersect(part, box)
                if both is None:
                    continue
                into = target[inside(both, box)]
                first = offset_in(part, both.start)
                last = offset_in(part, tuple(n - 1 for n in both.stop))
                size = both.numel * item
                contiguous = last - first + 1 == both.numel and into.is_contiguous()
                same = into.device.type == "cpu" and into.dtype == want.place.dtype
                if straight is not None and len(want.targets) == 1 and size >= _DIRECT and contiguous and same:
                    view = memoryview(into.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                    straight.append((at + first * item, at + first * item + size, view))
                else:
                    self._copies.append((into, raw.view(want.place.dtype).view(part.shape)[inside(both, part)]))

    def read(self, file: OpenFile) -> None:
        at = self.begin
        for view in self.views:
            if len(view):
                file.pread(view, at)
            at += len(view)

    def check(self, manifest: Manifest) -> None:
        stamp = manifest.files[self.path.name]
        digest = hashing.maker(stamp.name)()
        for view in self.views:
            digest.update(view)
        if digest.hexdigest() != stamp.digests[self.number]:
            held = ", ".join(_tensors_at(self.path, manifest, self.begin, self.end))
            where = f"at bytes {self.begin} to {self.end}: {held}"
            raise CheckpointError(f"{self.path}: its content changed after it was written ({stamp.name}), {where}")

    def copy(self) -> None:
        for into, values in self._copies:
            into.copy_(values)


def _tensors_at(path: Location, manifest: Manifest, begin: int, end: int) -> list[str]:
    """Names of the tensors in these bytes, as a message gives them."""
    try:
        held = {key for key, place in places(path).items() if place.begin < end and place.end > begin}
    except (OSError, ValueError):
        return ["the header"]
    tensors = manifest.tensors.items()
    names = [name for name, whole in tensors if any(p.file == path.name and p.key in held for p in whole.parts)]
    return names[:3] + ([f"and {len(names) - 3} more"] if len(names) > 3 else []) or ["the header"]
