"""Saving of a run: what a rank saves, and the saver that it uses."""

from typing import Any

from megalite.checkpoint.format.manifest import MODEL_PREFIXES
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage.location import Location
from megalite.config.options import Config
from megalite.config.plugins import plugin_hashes
from megalite.parallel.spec import TensorShard
from megalite.training.checkpointing.compatibility import tokenizer_identity
from megalite.training.state import Run


def shards_to_save(run: Run, optimizer: bool = True) -> list[TensorShard]:
    """Return the shards that this rank writes; without `optimizer` no optimizer state and no main weights."""
    shards = [*run.optimizer.checkpoint_shards(), *run.expert_balancer.state_shards()]
    return [shard for shard in shards if shard.is_owner and (optimizer or shard.name.startswith(MODEL_PREFIXES))]


def open_saver(run: Run, config: Config) -> CheckpointSaver | None:
    """Lock and test the directory of --save and return its saver, or None without --save; collective.

    Raises:
        CheckpointError: if the directory is locked or not writable.
    """
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return None
    num_bytes = sum(shard.data.nbytes for shard in shards_to_save(run, not checkpoint.no_save_optim))
    is_cuda = run.mesh.device.type == "cuda"
    saver = CheckpointSaver(
        checkpoint.save_local or checkpoint.save,
        run.mesh,
        num_bytes,
        upload_to=checkpoint.save if checkpoint.save_local else None,
        keep_last=checkpoint.keep_last,
        retain_interval=checkpoint.save_retain_interval,
        background=checkpoint.async_save == "on" or (checkpoint.async_save == "auto" and is_cuda),
    )
    saver.megatron_style = config.log.log_style == "megatron"
    return saver


def save(run: Run, saver: CheckpointSaver, config_toml: str, *, optimizer: bool = True, last: bool = False) -> Location:
    """Write a checkpoint, or start to write it in the background; collective.

    Args:
        config_toml: The configuration to store, as TOML.
        optimizer: Include the optimizer state.
        last: This is the run's last save.

    Raises:
        CheckpointError: on all ranks if writing fails.
    """
    run.sync.wait_param_sync()
    run.before_update = saver.before_update
    state: dict[str, Any] = {
        "progress": run.progress.to_json(),
        "updates": run.optimizer.num_updates,
        "rates": run.schedules.to_json(),
        "loss_scaler": run.loss_scaler.to_json(),
        "spikes": run.spikes.to_json(),
        "config": config_toml,
        "plugins": plugin_hashes(),
        "vocab_size": run.vocab_size,
        "tokenizer": tokenizer_identity(run.tokenizer),
    }
    if run.ledger is not None and run.mesh.world.is_first:  # only the state of rank 0 is written
        state["data"] = run.ledger.to_json(run.progress.consumed_samples)
    return saver.save(run.progress.step, shards_to_save(run, optimizer), state, last=last)
