"""Upload of checkpoints from a fast local disk to another directory or a bucket, in the background."""

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from megalite.checkpoint.format import manifest
from megalite.checkpoint.format.safetensors_file import BLOCK_BYTES, BlockHash, FileChecksum
from megalite.checkpoint.manager.retention import RetentionPolicy, is_complete
from megalite.checkpoint.storage.location import CheckpointError, Location, checkpoint_dir, error_text
from megalite.checkpoint.storage.storage import storage_of

_CONCURRENT_FILES = 4  # files that are uploaded at once


class Uploader:
    """A thread of rank 0 that copies checkpoints to another directory during training, oldest first. Not collective.

    Each file is hashed while it is copied, so that damage is not copied. A local checkpoint is deleted once its copy is
    complete, except the newest, which stays for a quick restart. Checkpoints that would not be kept are not uploaded. A
    failed upload is retried after the next save. All ranks must share the local disk: one node, or a fast shared file
    system.

    Call `notify` after every save. The run must hold the lock of `source`. The constructor raises CheckpointError if
    the target cannot be written.

    Args:
        source: The directory in which checkpoints are committed.
        retention: The target directory and the rule for its checkpoints.
        messages: Receives lines for the log.
    """

    def __init__(self, source: Location, retention: RetentionPolicy, messages: deque[str]):
        target = retention.directory
        self._source, self._target, self._retention = source, target, retention
        self._source_storage, self._target_storage = storage_of(source), storage_of(target)
        self._target_storage.check_writable(target, 0)
        self._lock = self._target_storage.lock(target)
        self._target_storage.remove_leftovers(target)
        self.paused = True  # until the start step is known: a rollback may need checkpoints that an upload would prune
        self._messages = messages
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="megalite-upload", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Wake the thread, because there may be a checkpoint to upload."""
        self._wake.set()

    def close(self, wait: bool = True) -> None:
        """Upload the remaining checkpoints, unless `wait` is False. Failures are reported in `messages`."""
        self._stop.set()
        self._wake.set()
        if wait:
            self._thread.join()
        self._lock.close()  # an upload that still runs notices this before it commits

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last_round = self._stop.is_set()  # read before the round, because a later notify causes another round
            try:
                if not self.paused:
                    self._upload_pending()
            except Exception as error:  # a disk or network failed; training continues
                next_try = "; the next run sends them" if is_last_round else "; the next save tries again"
                message = f"upload to {self._target} failed ({error_text(error)})"
                self._messages.append(f"{message}: checkpoints wait in {self._source}{next_try}")
            if is_last_round:
                return

    def _upload_pending(self) -> None:
        """Upload all pending checkpoints, and delete the local copies of uploaded ones."""
        source, target = self._source_storage, self._target_storage
        for step in source.steps_in(self._source):
            checkpoint, copy = checkpoint_dir(self._source, step), checkpoint_dir(self._target, step)
            if not is_complete(checkpoint):
                continue
            newer = sum(other > step for other in source.steps_in(self._source))
            if not self._retention.should_keep(step, newer):
                source.remove(checkpoint)
                self._messages.append(f"did not upload {checkpoint.name}: only newer ones are kept")
                continue
            # COMPLETE holds the hash of the manifest
            is_uploaded = "COMPLETE" in target.list_files(copy)
            if not is_uploaded or target.read(copy / "COMPLETE") != source.read(checkpoint / "COMPLETE"):
                started = time.perf_counter()
                nbytes = self._upload(step, checkpoint, copy)
                elapsed_s = time.perf_counter() - started
                speed = f"{nbytes / 2**20 / elapsed_s:.0f} MiB/s"
                self._messages.append(f"uploaded {copy} in {elapsed_s:.2f} s, {speed}")
                self._retention.complete_steps.add(step)
                self._retention.prune(step)
            is_newest = step == source.steps_in(self._source)[-1]
            if not is_newest and "KEEP" not in source.list_files(checkpoint) and not source.in_use(checkpoint):
                source.remove(checkpoint)

    def _upload(self, step: int, checkpoint: Location, copy: Location) -> int:
        """Copy a checkpoint, and return the size of its files in bytes."""
        self._lock.check_held()
        staging_dir = self._target_storage.staging_path(copy)
        files = manifest.load_manifest(checkpoint).files
        self._target_storage.make_staging(staging_dir)
        try:
            with (
                self._source_storage.read_lock(checkpoint),
                ThreadPoolExecutor(_CONCURRENT_FILES, "megalite-upload") as pool,
            ):
                list(
                    pool.map(lambda name: self._upload_file(checkpoint / name, staging_dir / name, files[name]), files)
                )
            self._lock.check_held()
            for name in ("manifest.json", "COMPLETE"):
                self._target_storage.write_text(
                    staging_dir / name, self._source_storage.read(checkpoint / name).decode()
                )
            self._target_storage.publish(staging_dir, copy)
        except BaseException:
            self._target_storage.discard(staging_dir)
            raise
        manifest.write_tracker(self._target, step)
        return sum(checksum.size for checksum in files.values())

    def _upload_file(self, source: Location, target: Location, checksum: FileChecksum) -> None:
        """Copy a file, and raise CheckpointError if its hash is wrong."""
        block_hash = BlockHash(checksum.algorithm, checksum.block_size)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with (
            contextlib.closing(self._source_storage.open(source)) as file,
            self._target_storage.open_new(target) as append,
        ):
            for start in range(0, checksum.size, BLOCK_BYTES):
                chunk = buffer[: min(BLOCK_BYTES, checksum.size - start)]
                file.pread(chunk, start)
                block_hash.update(chunk)
                append(chunk)
            if block_hash.checksum() != checksum:
                raise CheckpointError(f"{source}: its content changed after it was written")
