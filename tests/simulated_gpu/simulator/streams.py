"""Streams and events of the substitute for torch.cuda, under CUDA's rules: each call is a fact in the trace."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from simulated_gpu.simulator import graphs
from simulated_gpu.simulator.state import Listed, caller, machine
from simulated_gpu.simulator.trace import HostWait, Record, Wait
from simulated_gpu.simulator.trace import Stream as Number


def index_of(device: Any) -> int:
    """Return the index of an existing GPU; None means this thread's."""
    number, num_gpus = _get_device_index(device, optional=True), machine().num_gpus
    if not 0 <= number < num_gpus:
        raise RuntimeError(f"CUDA error: invalid device ordinal: {number} of {num_gpus} (asked for at {caller()})")
    return number


class Stream(Listed):
    """A stream, which the trace refers to by `number`."""

    def __init__(self, device: Any = None):
        self.device_index = index_of(device)
        self.number: Number = next(machine().numbers["stream"])

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def wait_event(self, event: Event) -> None:
        graphs.on_wait(self.number, event.number)
        if event.recorded:
            machine().trace.append(Wait(self.number, event.number))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        host_waits(HostWait(stream=self.number, where=caller()))


class Event(Listed):
    def __init__(self, enable_timing: bool = False):
        self.enable_timing, self.recorded, self._recorded_s = enable_timing, False, 0.0
        self.number = next(machine().numbers["event"])

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        graphs.on_record(stream.number, self.number)
        self.recorded, self._recorded_s = True, time.perf_counter()
        machine().trace.append(Record(self.number, stream.number))

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Return whether the host has waited for the event; without a wait, completion is unknown."""
        graphs.refuse("Event.query")
        return not self.recorded or machine().waited_for(self.number)

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds; both events must keep time, be recorded and have been waited for, as with CUDA."""
        events = (self, end_event)
        if not all(event.enable_timing for event in events):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not all(event.recorded for event in events):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not all(machine().waited_for(event.number) for event in events):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def synchronize(self) -> None:
        if self.recorded:
            host_waits(HostWait(event=self.number, where=caller()))


def host_waits(fact: HostWait) -> None:
    graphs.refuse(f"a wait of the host at {fact.where}")
    machine().trace.append(fact)


def synchronize(device: Any = None) -> None:
    index_of(device)
    host_waits(HostWait(where=caller()))


def default_stream(device: Any = None) -> Stream:
    stream = object.__new__(Stream)
    stream.device_index, stream.number = index_of(device), 0
    return stream


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    stream = machine().thread_state.streams.get(index)
    return stream if isinstance(stream, Stream) else default_stream(index)


def set_stream(stream: Stream) -> None:
    if stream is not None:
        thread = machine().thread_state
        thread.device, thread.streams[stream.device_index] = stream.device_index, stream
