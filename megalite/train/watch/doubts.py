"""The consequences of steps whose numbers are in doubt: they are reported, a bound on skipped steps and on steps that
the machine computes wrong ends the run, and after a spike the run may return to its last checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

from megalite.train.state import BadResult, Run, StepResult
from megalite.train.tell.run_dir import Events
from megalite.train.watch.suspect import documents_of

UNRELIABLE = 3  # steps of a run that only the second computation got right: more are not chance
MOST_ROLLBACKS = 3  # without a window of good steps between them
MOST_SAMPLES = 4096  # whose documents are recorded


@dataclass
class Doubts:
    """`say`: writes to the log. `max_skipped`: steps in a row."""

    run: Run
    events: Events
    say: Callable[[str], None]
    max_skipped: int
    skipped: int = 0  # steps in a row
    passed: int = 0  # steps that only the second computation got right

    def after(self, result: StepResult) -> str | None:
        """After each step: why this machine is unreliable, if it is; the same on all ranks. Raises BadResult."""
        doubt, step = result.doubt, self.run.state.step
        self.skipped = self.skipped + 1 if result.skipped and doubt is not None else 0
        if doubt is None:
            return None
        done = "skipped" if result.skipped else "updated"
        samples = range(self.run.state.consumed_samples - result.batch_size, self.run.state.consumed_samples)
        kind = "wrong-once" if doubt.passed else "spike" if doubt.finite else "not-finite"
        self.tell(kind, f"step {step}: {doubt}; {done}", samples[-MOST_SAMPLES:], done=done, ranks=doubt.differs)
        if self.skipped >= self.max_skipped:
            raise BadResult(f"max_skipped_steps={self.max_skipped} in a row: nothing is learned; step {step}: {doubt}")
        self.passed += doubt.passed and self.run.rerun == "validate_results"
        if self.passed < UNRELIABLE:
            return None
        return f"{self.passed} steps were right only when computed again, the last on ranks {list(doubt.differs)}"

    def tell(self, kind: str, text: str, samples: range, **facts: object) -> None:
        """Write to the log, and with the documents of the samples to events.jsonl."""
        if not self.run.mesh.world.is_first:
            return
        self.say(f"WARNING: {text}")
        documents = list(dict.fromkeys(place for i in samples for place in documents_of(self.run, i)))
        where = {"samples": [samples.start, samples.stop - 1], "documents": documents}
        self.events.add(kind, self.run.state.step, text=text, **where, **facts)

    def roll_back(self, saved: int | None, restore: Callable[[int], object]) -> bool:
        """Return to the checkpoint of step `saved`, which `restore` loads, and pass over the steps since, as with
        --iterations-to-skip. Returns whether that was done; collective. Raises BadResult."""
        run, state = self.run, self.run.state
        reached, rollbacks = state.step, run.spikes.rollbacks + 1
        if saved is None:
            self.say(f"WARNING: step {reached}: this run has no checkpoint yet to return to")
            return False
        if rollbacks > MOST_ROLLBACKS:
            raise BadResult(f"step {reached}: another spike, after {MOST_ROLLBACKS} rollbacks in a row")
        run.buffer.wait_gather()
        restore(saved)
        begin = state.consumed_samples
        while state.step < reached:
            run.pass_over()
        run.spikes.rollbacks = rollbacks
        passed = range(begin, state.consumed_samples)
        text = f"step {reached}: back to the checkpoint of step {saved}, without samples {begin}..{passed.stop - 1}"
        self.tell("rollback", text, passed[-MOST_SAMPLES:], checkpoint=saved)
        return True
