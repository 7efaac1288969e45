"""This rank's batches of the requests that each evaluation scores by likelihood (data/datasets/requests.py)."""

from collections.abc import Callable, Iterator

import numpy as np

from megalite.data.datasets.batches import MicroBatch
from megalite.data.datasets.requests import PackedRequests
from megalite.nn.micro_batch import Batch


class RequestLoader:
    """The requests in batches for the pipeline. Samples are dealt to the data-parallel ranks in order.

    Attributes:
        packed: The requests in samples.
        num_batches: The number of batches, the same on all ranks.
    """

    def __init__(
        self,
        packed: PackedRequests,
        prepare: Callable[[MicroBatch], Batch],
        micro_batch_size: int,
        batch_size: int,
        dp_rank: int,
        dp_size: int,
    ):
        """Create the loader.

        Args:
            packed: The requests in samples.
            prepare: Makes the model's batch of a micro-batch.
            micro_batch_size: The samples of a micro-batch.
            batch_size: The samples of a batch of all ranks; fewer if there are not so many.
            dp_rank: This data-parallel rank.
            dp_size: The number of data-parallel ranks.
        """
        self.packed = packed
        self._prepare = prepare
        unit = micro_batch_size * dp_size
        num_units = -(-len(packed.samples) // unit)
        units_per_batch = min(num_units, max(1, batch_size // unit))
        sample_ids = np.arange(num_units * unit).reshape(num_units, dp_size, micro_batch_size)[:, dp_rank]
        self._batches = [sample_ids[i : i + units_per_batch] for i in range(0, num_units, units_per_batch)]
        self.num_batches = len(self._batches)

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each batch, in host memory."""
        for sample_ids_MB in self._batches:
            yield [self._prepare(self.packed.micro_batch(sample_ids_B)) for sample_ids_B in sample_ids_MB]
