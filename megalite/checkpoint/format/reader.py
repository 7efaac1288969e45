"""Read one checkpoint under any layout: check all of it, or fill pieces from it.

`Reader.fill` finds the blocks that hold something for the pieces. Each is read once, hashed, and its wanted parts are
copied to their targets. One thread reads while another hashes. A file system reads ahead only for a reader that goes in
order, so there the threads take turns, and bytes go straight into a target that is contiguous in both places; behind a
URL many blocks are requested at once. All else goes through one buffer per thread, which stays in the processor's
cache: fresh pages for a whole file would cost more time than reading it. run/loader.py chooses the checkpoint.
"""

import contextlib
import mmap
import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import Manifest, check_file_sizes
from megalite.checkpoint.format.safetensors_file import (
    FileChecksum,
    TensorLocation,
    hash_constructor,
    read_header,
    shard_views,
)
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.storage import OpenFile, storage_of
from megalite.config.console import logged_progress
from megalite.parallel.spec import Box, TensorShard, flat_offset, intersect, rectangles, slices_within

_DIRECT = 1 << 16  # bytes; a read of less costs more than copying it


class ReadItem(NamedTuple):
    """A stored box, where its bytes are, and the tensors that want a part of it, each with its own box."""

    place: TensorLocation
    stored: Box
    targets: tuple[tuple[Tensor, Box], ...]


def verify_checkpoint(folder: Location, manifest: Manifest, tell: str | None = None) -> None:
    """Check the size of every file and the hash of every block. Raises CheckpointError with the first damaged file and
    the tensors in the block. `tell`: title of the lines of progress."""
    check_file_sizes(folder, manifest)
    blocks = {(name, i): () for name, stamp in manifest.files.items() for i in range(len(stamp.digests))}
    CheckpointReader(folder, manifest).read_blocks(blocks, tell)


def mismatches(manifest: Manifest, pieces: Sequence[TensorShard], exact: bool = False) -> list[str]:
    """The reasons why `pieces` cannot be filled, one line each. `exact`: another dtype, else converted, is one."""
    lines = []
    for piece in {p.name: p for p in pieces}.values():
        stored, dtype = manifest.tensors.get(piece.name), str(piece.data.dtype)[6:]
        if stored is None:
            lines.append(f"{piece.name}: shape {piece.shape} here, not in the checkpoint")
        elif stored.shape != piece.shape:
            lines.append(f"{piece.name}: shape {piece.shape} here, {stored.shape} in the checkpoint")
        elif exact and stored.dtype != dtype:
            lines.append(f"{piece.name}: {dtype} here, {stored.dtype} in the checkpoint")
    return lines


class CheckpointReader:
    """Reads one checkpoint. Keeps, between calls, the checked headers of its files, and the buffers of the threads."""

    def __init__(self, folder: Location, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._storage = storage_of(folder)
        self._headers: dict[str, dict[str, TensorLocation]] = {}
        self._buffers: list[Tensor] = []

    def fill(self, pieces: Sequence[TensorShard], tell: str | None = None) -> None:
        """Write the checkpoint's values into `pieces`, which fit it, and check every block that a value comes from. A
        block with a wrong hash is not used, but those before it were: after CheckpointError the pieces hold a mixture.
        `tell`: title of the lines of progress."""
        wanted: dict[str, dict[str, tuple[Box, list[tuple[Tensor, Box]]]]] = {}  # file -> key -> box, its targets
        for piece in pieces:
            for box, target in shard_views(piece):
                for part in self.manifest.tensors[piece.name].boxes:
                    if intersect(box, part.box) is not None:
                        _, targets = wanted.setdefault(part.file, {}).setdefault(part.key, (part.box, []))
                        targets.append((target, box))
        with self._storage.read_lock(self.folder):
            new = [name for name in wanted if name not in self._headers]
            with ThreadPoolExecutor(self._storage.num_readers, thread_name_prefix="megalite-load") as pool:
                read = dict(zip(new, pool.map(self._header, new), strict=True))
            headers = self._headers | read
            wants: dict[tuple[str, int], list[ReadItem]] = {}
            for name in sorted(wanted):
                block, header, last = self.manifest.files[name].block_size, headers[name], 0
                begins = {key: header[key].begin if key in header else 0 for key in wanted[name]}
                for key in sorted(begins, key=lambda key: begins[key]):
                    (stored, targets), place = wanted[name][key], header.get(key)
                    if place is None or place.shape != stored.shape or place.begin < last:
                        wrong = f"its header and the manifest differ about {key}"
                        raise CheckpointError(f"{self.folder / name}: {wrong}")
                    last = place.end
                    want = ReadItem(place, stored, tuple(targets))
                    for i in sorted({i for target in targets for i in _blocks_of(target[1], stored, place, block)}):
                        wants.setdefault((name, i), []).append(want)
                for i in range(-(-min(place.begin for place in header.values()) // block) if name in read else 0):
                    wants.setdefault((name, i), [])  # to check the header, too
            self.read_blocks(wants, tell)
        self._headers.update(read)

    def _header(self, name: str) -> dict[str, TensorLocation]:
        try:
            return read_header(self.folder / name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder / name}: its header cannot be read ({error!r})") from None

    def read_blocks(self, wants: Mapping[tuple[str, int], Sequence[ReadItem]], tell: str | None) -> None:
        """Read the blocks of `wants`, (file, number), in order, check their hashes, and fill the targets. Raises
        CheckpointError with the first wrong block and the tensors in it."""
        todo, folder, manifest, storage = sorted(wants), self.folder, self.manifest, self._storage
        turn = threading.Lock() if storage.sequential else contextlib.nullcontext()
        files = _Files(folder, Counter(name for name, _ in todo))
        threads = min(storage.num_readers, len(todo))
        largest = max((min(stamp.block_size, stamp.size) for stamp in manifest.files.values()), default=0)
        try:  # mmap, since malloc keeps the memory of a thread for later threads
            more = range(threads - len(self._buffers))
            self._buffers += [torch.frombuffer(mmap.mmap(-1, largest), dtype=torch.uint8) for _ in more]
        except (OSError, MemoryError) as error:
            raise CheckpointError(f"{folder}: cannot be read ({error})") from None
        free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._buffers:
            free.put(buffer)

        def work(job: tuple[str, int]) -> None:
            name, buffer = job[0], free.get()
            try:
                block = _Block(folder / name, manifest.files[name], job[1], buffer, wants[job], storage.sequential)
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

        total = (
            sum(min(s.block_size, s.size - i * s.block_size) for name, i in todo for s in [manifest.files[name]])
            / 2**30
        )
        progress = logged_progress(tell or "", total, "GiB that this rank needs", tell is None)
        with contextlib.closing(files), progress, ThreadPoolExecutor(max(1, threads), "megalite-read") as pool:
            for _ in pool.map(work, todo):  # raises the first error in order; all earlier blocks are done
                pass


def _blocks_of(box: Box, stored: Box, place: TensorLocation, block: int) -> range:
    """The blocks from the first to the last byte that `box` wants of `stored`."""
    both = intersect(box, stored)
    assert both is not None
    first, last = flat_offset(stored, both.start), flat_offset(stored, tuple(n - 1 for n in both.stop))
    item = place.dtype.itemsize
    return range((place.begin + first * item) // block, -(-(place.begin + (last + 1) * item) // block))


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
        self, path: Location, stamp: FileChecksum, number: int, buffer: Tensor, wants: Sequence[ReadItem], direct: bool
    ):
        self.path, self.stamp, self.number = path, stamp, number
        self.begin, self.end = number * stamp.block_size, min(stamp.size, (number + 1) * stamp.block_size)
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

    def _plan(self, want: ReadItem, straight: list[tuple[int, int, memoryview]] | None) -> None:
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
                into = target[slices_within(both, box)]
                first = flat_offset(part, both.start)
                last = flat_offset(part, tuple(n - 1 for n in both.stop))
                size = both.numel * item
                contiguous = last - first + 1 == both.numel and into.is_contiguous()
                same = into.device.type == "cpu" and into.dtype == want.place.dtype
                if straight is not None and len(want.targets) == 1 and size >= _DIRECT and contiguous and same:
                    view = memoryview(into.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                    straight.append((at + first * item, at + first * item + size, view))
                else:
                    self._copies.append((into, raw.view(want.place.dtype).view(part.shape)[slices_within(both, part)]))

    def read(self, file: OpenFile) -> None:
        at = self.begin
        for view in self.views:
            if len(view):
                file.pread(view, at)
            at += len(view)

    def check(self, manifest: Manifest) -> None:
        digest = hash_constructor(self.stamp.algorithm)()
        for view in self.views:
            digest.update(view)
        if digest.hexdigest() != self.stamp.digests[self.number]:
            try:
                inside_it = {k for k, p in read_header(self.path).items() if p.begin < self.end and p.end > self.begin}
            except (OSError, ValueError):
                inside_it = set()
            here = ((name, p) for name, whole in manifest.tensors.items() for p in whole.boxes)
            names = list(dict.fromkeys(n for n, p in here if p.file == self.path.name and p.key in inside_it))
            names[3:] = [f"and {len(names) - 3} more"] * (len(names) > 3)
            where = f"at bytes {self.begin} to {self.end}: {', '.join(names) or 'the header'}"
            raise CheckpointError(
                f"{self.path}: its content changed after it was written ({self.stamp.algorithm}), {where}"
            )

    def copy(self) -> None:
        for into, values in self._copies:
            into.copy_(values)
