"""Reading one checkpoint under any layout: verify all of it, or fill shards from it.

`CheckpointReader.fill` finds the blocks that hold values for the shards. Each block is read once and hashed, and the
requested parts are copied to their targets. One thread reads while another hashes.

A local file system only reads ahead for sequential reads, so there the threads take turns at reading. Bytes are read
directly into a target that is contiguous both in memory and in the file. Behind a URL, many blocks are requested
concurrently. All other bytes go through one buffer per thread, which stays in the CPU cache: allocating new pages for a
full file would take longer than reading it. manager/loader.py chooses the checkpoint.
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
from megalite.common.console import logged_progress
from megalite.parallel.spec import Box, TensorShard, flat_offset, intersect, rectangles, slices_within

# the requested boxes of a file: key -> (stored box, its targets: (tensor, its box in the full tensor))
Requests = dict[str, tuple[Box, list[tuple[Tensor, Box]]]]
_MIN_DIRECT_BYTES = 1 << 16  # a smaller direct read costs more than a copy


class ReadItem(NamedTuple):
    """A stored box, the location of its bytes, and the tensors that need a part of it.

    `targets` has (tensor, its box in the full tensor) for each of them.
    """

    location: TensorLocation
    stored: Box
    targets: tuple[tuple[Tensor, Box], ...]


def verify_checkpoint(directory: Location, manifest: Manifest, progress_title: str | None = None) -> None:
    """Check the size of every file and the hash of every block.

    `progress_title` is the title of the progress lines; None logs no progress. Raises CheckpointError naming the first
    damaged file and the tensors in the damaged block.
    """
    check_file_sizes(directory, manifest)
    blocks = {(name, i): () for name, checksum in manifest.files.items() for i in range(len(checksum.digests))}
    CheckpointReader(directory, manifest).read_blocks(blocks, progress_title)


def mismatches(manifest: Manifest, shards: Sequence[TensorShard], exact_dtype: bool = False) -> list[str]:
    """Return the reasons why `shards` cannot be filled from the checkpoint, one line each.

    With `exact_dtype`, a different dtype is one of them. Otherwise values are converted.
    """
    lines = []
    for shard in {shard.name: shard for shard in shards}.values():
        stored, dtype = manifest.tensors.get(shard.name), str(shard.data.dtype).removeprefix("torch.")
        if stored is None:
            lines.append(f"{shard.name}: shape {shard.shape} here, not in the checkpoint")
        elif stored.shape != shard.shape:
            lines.append(f"{shard.name}: shape {shard.shape} here, {stored.shape} in the checkpoint")
        elif exact_dtype and stored.dtype != dtype:
            lines.append(f"{shard.name}: {dtype} here, {stored.dtype} in the checkpoint")
    return lines


class CheckpointReader:
    """A reader of one checkpoint. Between calls it keeps the verified headers and the threads' buffers."""

    def __init__(self, directory: Location, manifest: Manifest):
        self.directory, self.manifest = directory, manifest
        self._storage = storage_of(directory)
        self._headers: dict[str, dict[str, TensorLocation]] = {}
        self._buffers: list[Tensor] = []

    def fill(self, shards: Sequence[TensorShard], progress_title: str | None = None) -> None:
        """Write the checkpoint's values into `shards`, and verify every block that a value comes from.

        The shards must fit the checkpoint (see `mismatches`). A block with a wrong hash is not used, but earlier blocks
        were: after CheckpointError the shards hold a mixture of old and new values.

        Args:
            shards: The shards to fill, in their own dtypes and on their devices.
            progress_title: The title of the progress lines; None logs no progress.
        """
        requests = self._requests(shards)
        with self._storage.read_lock(self.directory):
            new_files = [name for name in requests if name not in self._headers]
            with ThreadPoolExecutor(self._storage.num_readers, thread_name_prefix="megalite-load") as pool:
                new_headers = dict(zip(new_files, pool.map(self._header, new_files), strict=True))
            headers = self._headers | new_headers
            items: dict[tuple[str, int], list[ReadItem]] = {}  # (file, block number) -> what is read from the block
            for name in sorted(requests):
                self._add_read_items(items, name, requests[name], headers[name])
                if name in new_headers:  # verify the blocks of the header, too
                    header_end = min(location.start for location in headers[name].values())
                    for i in range(-(-header_end // self.manifest.files[name].block_size)):
                        items.setdefault((name, i), [])
            self.read_blocks(items, progress_title)
        self._headers.update(new_headers)

    def _requests(self, shards: Sequence[TensorShard]) -> dict[str, Requests]:
        """Return the stored boxes that hold values of `shards`, by file."""
        requests: dict[str, Requests] = {}
        for shard in shards:
            for box, target in shard_views(shard):
                for stored in self.manifest.tensors[shard.name].boxes:
                    if intersect(box, stored.box) is not None:
                        request = requests.setdefault(stored.file, {}).setdefault(stored.key, (stored.box, []))
                        request[1].append((target, box))
        return requests

    def _add_read_items(
        self,
        items: dict[tuple[str, int], list[ReadItem]],
        name: str,
        requests: Requests,
        header: Mapping[str, TensorLocation],
    ) -> None:
        """Add what is to be read from file `name`, by (file, block number).

        Raises:
            CheckpointError: if the header of the file disagrees with the manifest.
        """
        block_size = self.manifest.files[name].block_size
        starts = {key: header[key].start if key in header else 0 for key in requests}
        previous_end = 0
        for key in sorted(starts, key=lambda key: starts[key]):
            stored_box, targets = requests[key]
            location = header.get(key)
            if location is None or location.shape != stored_box.shape or location.start < previous_end:
                message = f"its header and the manifest disagree on {key}"
                raise CheckpointError(f"{self.directory / name}: {message}")
            previous_end = location.end
            item = ReadItem(location, stored_box, tuple(targets))
            blocks = {i for _, box in targets for i in _blocks_of(box, stored_box, location, block_size)}
            for i in sorted(blocks):
                items.setdefault((name, i), []).append(item)

    def _header(self, name: str) -> dict[str, TensorLocation]:
        try:
            return read_header(self.directory / name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.directory / name}: its header cannot be read ({error!r})") from None

    def read_blocks(self, items: Mapping[tuple[str, int], Sequence[ReadItem]], progress_title: str | None) -> None:
        """Read blocks in order, verify their hashes, and fill the targets.

        Args:
            items: What to read from each block, by (file name, block number). A block without items is only verified.
            progress_title: The title of the progress lines; None logs no progress.

        Raises:
            CheckpointError: The hash of a block is wrong. The message has the first such block and the tensors in it.
        """
        directory, manifest, storage = self.directory, self.manifest, self._storage
        todo = sorted(items)
        turn = threading.Lock() if storage.sequential else contextlib.nullcontext()
        files = _OpenFiles(directory, Counter(name for name, _ in todo))
        threads = min(storage.num_readers, len(todo))
        largest = max((min(checksum.block_size, checksum.size) for checksum in manifest.files.values()), default=0)
        try:  # mmap, because malloc would keep a thread's memory for later threads
            missing_buffers = threads - len(self._buffers)
            self._buffers += [
                torch.frombuffer(mmap.mmap(-1, largest), dtype=torch.uint8) for _ in range(missing_buffers)
            ]
        except (OSError, MemoryError) as error:
            raise CheckpointError(f"{directory}: cannot be read ({error})") from None
        free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._buffers:
            free.put(buffer)

        def work(block_id: tuple[str, int]) -> None:
            name, number = block_id
            buffer = free.get()
            try:
                block = _Block(
                    directory / name, manifest.files[name], number, buffer, items[block_id], storage.sequential
                )
                with turn:
                    block.read(files.get(name))
                block.check(manifest)
                block.copy()
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{directory / name}: cannot be read ({error})") from error
            finally:
                free.put(buffer)
            files.done(name)
            progress.add((block.end - block.start) / 2**30)

        total_bytes = 0
        for name, number in todo:
            checksum = manifest.files[name]
            total_bytes += min(checksum.block_size, checksum.size - number * checksum.block_size)
        progress = logged_progress(
            progress_title or "", total_bytes / 2**30, "GiB that this rank needs", progress_title is None
        )
        with contextlib.closing(files), progress, ThreadPoolExecutor(max(1, threads), "megalite-read") as pool:
            for _ in pool.map(work, todo):  # raises the first error in block order; all earlier blocks are done
                pass


def _blocks_of(box: Box, stored: Box, location: TensorLocation, block_size: int) -> range:
    """Return the numbers of the blocks from the first to the last byte of `stored` that `box` needs."""
    overlap = intersect(box, stored)
    assert overlap is not None
    first, last = flat_offset(stored, overlap.start), flat_offset(stored, tuple(n - 1 for n in overlap.stop))
    itemsize = location.dtype.itemsize
    return range(
        (location.start + first * itemsize) // block_size, -(-(location.start + (last + 1) * itemsize) // block_size)
    )


class _OpenFiles:
    """The open files of a checkpoint. Each is closed after its last block has been read."""

    def __init__(self, directory: Location, blocks_left: Counter[str]):
        self._directory, self._blocks_left = directory, blocks_left
        self._open: dict[str, OpenFile] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> OpenFile:
        with self._lock:
            if name not in self._open:
                path = self._directory / name
                self._open[name] = storage_of(path).open(path)
            return self._open[name]

    def done(self, name: str) -> None:
        """Count one block of the file as read."""
        with self._lock:
            self._blocks_left[name] -= 1
            if not self._blocks_left[name]:
                self._open.pop(name).close()

    def close(self) -> None:
        for file in self._open.values():
            file.close()


class _Block:
    """One block of one file.

    Its bytes are read into `views`, consecutive parts of `buffer` or, if `direct`, of a target tensor.
    """

    def __init__(
        self,
        path: Location,
        checksum: FileChecksum,
        number: int,
        buffer: Tensor,
        items: Sequence[ReadItem],
        direct: bool,
    ):
        self.path, self.checksum, self.number = path, checksum, number
        self.start = number * checksum.block_size
        self.end = min(checksum.size, (number + 1) * checksum.block_size)
        self._buffer = buffer[: self.end - self.start]
        self._copies: list[tuple[Tensor, Tensor]] = []
        direct_reads: list[tuple[int, int, memoryview]] = []
        for item in items:
            self._plan(item, direct_reads if direct else None)
        self.views: list[memoryview] = []
        buffer_bytes = memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        offset = self.start
        for start, end, view in sorted(direct_reads, key=lambda x: x[0]):
            if start < offset:
                raise ValueError(f"two tensors claim bytes {start} to {offset}")
            self.views += [buffer_bytes[offset - self.start : start - self.start], view]
            offset = end
        self.views.append(buffer_bytes[offset - self.start :])

    def _plan(self, item: ReadItem, direct_reads: list[tuple[int, int, memoryview]] | None) -> None:
        """Plan the copies of the part of `item` that lies in this block.

        A read that needs no copy is appended to `direct_reads` as (start, end, view of the target), unless this is
        None.
        """
        itemsize = item.location.dtype.itemsize
        start, end = max(self.start, item.location.start), min(self.end, item.location.end)
        if (start - item.location.start) % itemsize or (end - item.location.start) % itemsize:
            raise ValueError(f"an element lies in two blocks, before byte {start} or {end}")
        span = range((start - item.location.start) // itemsize, (end - item.location.start) // itemsize)
        for part, part_span in rectangles(item.stored, span):
            offset = start + part_span.start * itemsize
            raw = self._buffer[offset - self.start : offset - self.start + len(part_span) * itemsize]
            for target, box in item.targets:
                overlap = intersect(part, box)
                if overlap is None:
                    continue
                destination = target[slices_within(overlap, box)]
                first = flat_offset(part, overlap.start)
                last = flat_offset(part, tuple(n - 1 for n in overlap.stop))
                size = overlap.numel * itemsize
                contiguous = last - first + 1 == overlap.numel and destination.is_contiguous()
                needs_no_conversion = destination.device.type == "cpu" and destination.dtype == item.location.dtype
                if (
                    direct_reads is not None
                    and len(item.targets) == 1
                    and size >= _MIN_DIRECT_BYTES
                    and contiguous
                    and needs_no_conversion
                ):
                    view = memoryview(destination.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                    direct_reads.append((offset + first * itemsize, offset + first * itemsize + size, view))
                else:
                    self._copies.append(
                        (destination, raw.view(item.location.dtype).view(part.shape)[slices_within(overlap, part)])
                    )

    def read(self, file: OpenFile) -> None:
        """Read the bytes of the block into its views."""
        offset = self.start
        for view in self.views:
            if len(view):
                file.pread(view, offset)
            offset += len(view)

    def check(self, manifest: Manifest) -> None:
        """Raise CheckpointError with the tensors in the block if its hash is wrong."""
        digest = hash_constructor(self.checksum.algorithm)()
        for view in self.views:
            digest.update(view)
        if digest.hexdigest() != self.checksum.digests[self.number]:
            try:
                header = read_header(self.path)
            except (OSError, ValueError):
                header = {}
            keys = {key for key, location in header.items() if location.start < self.end and location.end > self.start}
            stored_boxes = ((name, box) for name, tensor in manifest.tensors.items() for box in tensor.boxes)
            names = list(
                dict.fromkeys(name for name, box in stored_boxes if box.file == self.path.name and box.key in keys)
            )
            if len(names) > 3:
                names[3:] = [f"and {len(names) - 3} more"]
            where = f"at bytes {self.start} to {self.end}: {', '.join(names) or 'the header'}"
            raise CheckpointError(
                f"{self.path}: its content changed after it was written ({self.checksum.algorithm}), {where}"
            )

    def copy(self) -> None:
        """Copy the values from the buffer to the targets."""
        for destination, values in self._copies:
            destination.copy_(values)
