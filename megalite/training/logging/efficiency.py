"""The eight efficiency values of a training, for log lines, report.json and `megalite bench`."""

from collections.abc import Mapping

from megalite.planning.bottleneck import COMMUNICATION_AXES

OUTSIDE_STEPS = ("start-up", "checkpoint", "evaluation", "profiler")  # phases that are no part of a step


def step_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each phase in the time of steps; empty if no step was measured.

    Args:
        seconds: Seconds by phase. Phases outside of steps are ignored.
    """
    in_steps = {phase: phase_s for phase, phase_s in seconds.items() if phase not in OUTSIDE_STEPS}
    total_s = sum(in_steps.values())
    return {phase: phase_s / total_s for phase, phase_s in in_steps.items()} if total_s else {}


def efficiency(
    shares: Mapping[str, float], samples_per_s: float, memory_utilization: float, price_per_hour: float | None
) -> dict[str, float | None]:
    """Return the efficiency values by name; a value that is not known is None.

    Args:
        shares: The share of a step by phase, or by mesh axis in place of the phase "communication"; empty if no step
            was measured. A replayed graph has no separate forward and backward.
        samples_per_s: Of all devices together.
        memory_utilization: The peak of the allocated memory, as a share of the memory.
        price_per_hour: The price of all devices together.
    """
    cost = None if price_per_hour is None or not samples_per_s else price_per_hour / 3600 / samples_per_s
    values: dict[str, float | None] = {
        "gpu_utilization": sum(shares.get(phase, 0.0) for phase in ("forward", "backward", "graph", "optimizer")),
        "memory_utilization": memory_utilization,
        "samples_per_s": samples_per_s,
        "cost_per_sample": cost,
        "data_time": shares.get("data", 0.0),
        "forward_time": None if "graph" in shares else shares.get("forward", 0.0),
        "backward_time": None if "graph" in shares else shares.get("backward", 0.0),
        "communication_time": sum(shares.get(phase, 0.0) for phase in ("communication", *COMMUNICATION_AXES)),
    }
    if not shares:
        for name in ("gpu_utilization", "data_time", "forward_time", "backward_time", "communication_time"):
            values[name] = None
    return values


def describe_efficiency(values: Mapping[str, float | None]) -> str:
    """Return the efficiency values as one line; those that are not known are left out."""
    formats = {
        "gpu_utilization": "devices compute {:.1%} of a step",
        "data_time": "data {:.1%}",
        "forward_time": "forward {:.1%}",
        "backward_time": "backward {:.1%}",
        "communication_time": "communication {:.1%}",
        "memory_utilization": "memory {:.1%} full",
        "samples_per_s": "{:,.4g} samples/s",
        "cost_per_sample": "cost per sample {:.3g}",
    }
    return ", ".join(text.format(values[name]) for name, text in formats.items() if values.get(name) is not None)
