"""Half-open ranges of whole numbers and what is known of each: split where a question begins or ends, joined when one
value is put over many. A range is made when it is first asked for.

>>> marks = Intervals(list, list.copy)
>>> for value in marks.within(0, 8): value.append("a")
>>> for value in marks.within(4, 12): value.append("b")
>>> [value for value in marks.all()]
[['a'], ['a', 'b'], ['b']]
>>> marks.fill(2, 10, ["c"]); marks.all()
[['a'], ['c'], ['b']]
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Intervals(Generic[T]):
    """`make`: the value of a range that nothing is known of; `clone`: of a half, where one is split."""

    def __init__(self, make: Callable[[], T], clone: Callable[[T], T]):
        self._make, self._clone = make, clone
        self._starts: list[int] = []  # of ranges that do not overlap, in order
        self._stops: list[int] = []
        self._values: list[T] = []

    def all(self) -> list[T]:
        return self._values

    def within(self, start: int, stop: int) -> Iterator[T]:
        """The values of start..stop, whose ranges end there."""
        if start >= stop:
            return iter(())
        if len(self._starts) == 1 and self._starts[0] == start and self._stops[0] == stop:  # most memory, always
            return iter(self._values)
        first, last = self._cut(start, stop)
        at, position = first, start
        while position < stop:
            if at == last or self._starts[at] > position:  # a hole
                end = stop if at == last else self._starts[at]
                self._insert(at, position, end, self._make())
                last += 1
            position = self._stops[at]
            at += 1
        return iter(self._values[first:last])

    def fill(self, start: int, stop: int, value: T) -> None:
        """One value for all of start..stop."""
        if start >= stop:
            return
        if len(self._starts) == 1 and self._starts[0] == start and self._stops[0] == stop:
            self._values[0] = value
            return
        first, last = self._cut(start, stop)
        self._starts[first:last], self._stops[first:last], self._values[first:last] = [start], [stop], [value]

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Which ranges lie in start..stop, after those across its ends were split."""
        for place in (start, stop):
            at = bisect_right(self._starts, place) - 1
            if at >= 0 and self._starts[at] < place < self._stops[at]:
                self._insert(at + 1, place, self._stops[at], self._clone(self._values[at]))
                self._stops[at] = place
        return bisect_left(self._starts, start), bisect_left(self._starts, stop)

    def _insert(self, at: int, start: int, stop: int, value: T) -> None:
        self._starts.insert(at, start)
        self._stops.insert(at, stop)
        self._values.insert(at, value)
