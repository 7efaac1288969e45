"""A tracker: Comet (pip install comet_ml), with the rows of metrics.jsonl, and the options as parameters.

megalite train --plugin examples/plugins/tracker.py --preset tiny --vocab-size 300 --mock-data \
  --train-iters 20 --eval-iters 2 --micro-batch-size 2 --global-batch-size 8 --save runs/tracked

Comet reads COMET_API_KEY, COMET_PROJECT_NAME and its other variables. COMET_START_ONLINE=0 needs no network: it writes
a file to COMET_OFFLINE_DIRECTORY, for `comet upload`. A tracker is written in a thread of its own, so that one that is
slow, broken or not installed neither delays nor ends the run.
"""

from collections.abc import Mapping

import megalite
from megalite.training.logging.metrics_sinks import TrackedRun


@megalite.register("tracker", "comet")
class Comet:
    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def open(self) -> None:
        """Start an experiment, or continue that of a run that is resumed."""
        import comet_ml  # type: ignore[import-not-found]

        key_file = self.run.id_file("comet_run_id.txt")
        key = key_file.read()
        self.experiment = comet_ml.start(
            experiment_key=key,
            mode="create" if key is None else "get_or_create",
            experiment_config=comet_ml.ExperimentConfig(name=self.run.name, auto_output_logging=False),
        )
        key_file.write(self.experiment.get_key())
        if key is None:
            self.experiment.log_parameters(self.run.config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a row."""
        self.experiment.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Send what is pending, and end the experiment."""
        self.experiment.end()
