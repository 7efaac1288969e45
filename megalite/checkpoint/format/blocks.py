"""The blocks of a checkpoint's files: each is read once, hashed, and what is wanted of it put where it belongs.

One thread reads while another hashes. A file system reads ahead only of who reads in order, so there the threads take
turns at reading, and bytes go straight into a target that is contiguous in both places; behind a URL many requests
are under way, each for a block. All else goes through a buffer of one block per thread, which stays in the processor's
cache: fresh pages for the bytes of a whole file would cost more time than reading them.
"""

from __future__ import annotations

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
    """A stored box, where its bytes are, and the tensors that want a part of it: each with the box that it holds."""

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
    CheckpointError that names the first block that is wrong, and the tensors in it. `tell`: what this is called in the
    lines that say how far it is. `buffers`: of earlier calls for this checkpoint; this one adds those that it makes."""
    storage = storage_of(folder)
    turn = threading.Lock() if storage.in_order else contextlib.nullcontext()
    jobs: queue.SimpleQueue[tuple[int, str, int]] = queue.SimpleQueue()
    for n, (name, i) in enumerate(todo):
        jobs.put((n, name, i))
    files = _Files(folder, Counter(name for name, _ in todo))
    wrong: dict[int, CheckpointError] = {}
    threads = min(storage.readers, len(todo))
    buffers = [] if buffers is None else buffers
    largest = max((min(stamp.block, stamp.size) for stamp in manifest.files.values()), default=0)
    # not of malloc, which keeps what it gave to a thread for threads to come
    try:
        buffers += [torch.frombuffer(mmap.mmap(-1, largest), dtype=torch.uint8) for _ in range(threads - len(buffers))]
    except (OSError, MemoryError) as error:
        raise _named(folder, error) from None

    def work(buffer: Tensor) -> None:
        while not wrong:
            try:
                n, name, i = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                wanted = (wants or {}).get((name, i), ())
                block = _Block(folder / name, manifest, i, buffer, wanted, storage.in_order)
                with turn:
                    block.read(files.get(name))
                block.check(manifest)
                block.copy()
            except Exception as error:  # of another thread's life: raised below
                wrong[n] = _named(folder / name, error)
                return
            files.done(name)
            progress.add((block.end - block.begin) / 2**30)

    total = sum(min(s.block, s.size - i * s.block) for name, i in todo for s in [manifest.files[name]]) / 2**30
    progress = told(tell or "", total, "GiB that this rank needs", tell is None)
    with contextlib.closing(files), progress, ThreadPoolExecutor(max(1, threads), "megalite-read") as pool:
        list(pool.map(work, buffers[:threads]))
    if wrong:
        raise wrong[min(wrong)]  # whoever took a block before this one has ended it


def _named(path: Location, error: Exception) -> CheckpointError:
    return error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: cannot be read ({error})")


class _Files:
    """Files that are open as long as a block of them is to be read; a checkpoint has one for each rank."""

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
        """With one block."""
        with self._lock:
            self._left[name] -= 1
            if not self._left[name]:
                self._open.pop(name).close()

    def close(self) -> None:
        for file in self._open.values():
            file.close()


class _Block:
    """One block of one file: its bytes in `views`, some of them in their target already, the others in `buffer`."""

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
        """What of this block goes where."""
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
                if (
                    straight is not None
                    and len(want.targets) == 1
                    and size >= _DIRECT
                    and last - first + 1 == both.numel
                    and into.is_contiguous()
                    and into.device.type == "cpu"
                    and into.dtype == want.place.dtype
                ):
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
            raise CheckpointError(
                f"{self.path}: its content changed after it was written ({stamp.name}), at bytes {self.begin} to "
                f"{self.end}: {held}"
            )

    def copy(self) -> None:
        for into, values in self._copies:
            into.copy_(values)


def _tensors_at(path: Location, manifest: Manifest, begin: int, end: int, most: int = 3) -> list[str]:
    """Names of the tensors in these bytes, for people."""
    try:
        where = places(path)
    except (OSError, ValueError):
        return ["the header"]
    names = [
        name
        for name, whole in manifest.tensors.items()
        for part in whole.parts
        if part.file == path.name and part.key in where and where[part.key].begin < end and where[part.key].end > begin
    ]
    names = list(dict.fromkeys(names))
    return names[:most] + ([f"and {len(names) - most} more"] if len(names) > most else []) or ["the header"]
