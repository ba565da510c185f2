"""One step as events: tasks that wait for one another and for the one resource that each of them needs.

    processor   forward, backward bucket by bucket, encode, serve, update
    inside      what the ranks of a box exchange among themselves, where the topology is node first
    wire        the link of the box: the two collectives of each bucket, one after the other

A resource does one task at a time, and of those that are ready the one that has been ready longest. A bucket is

    backward's part -> encode -> (inside) -> first collective -> serve -> second collective -> (inside)

So bucket 2 is computed while bucket 1 crosses, and what is left over at the end is what the wire could not hide. With
K equal buckets and nothing but backward and a wire it comes to busy + wire - (1 - 1/K) min(backward, wire).

All ranks are taken to be alike. One that is late holds up every collective: workers/plan/cluster.py draws who is late.
Nothing is imported but the standard library: what is asked without torch must start without it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

PROCESSOR, INSIDE, WIRE = range(3)
RESOURCES = 3
MOST_BUCKETS = 64
"""That are gone through one by one. What a step takes is a + b / K in the number of buckets K, exactly so where no
kernels compete with backward; of more buckets a and b are those of half as many as this and of this."""


@dataclass(frozen=True, slots=True)
class Course:
    """What a step does, in seconds; of all its buckets together where there are several. All at least 0.

    head_s: before the first bucket can be made, and after the last one is there: forward, the update. backward_s:
    while which buckets leave. encode_s, serve_s: of the exchange's kernels. inside_s: in the box, half of it before
    and half after what crosses. wire_s: of both collectives, of which first_part is the first one's.
    """

    head_s: float
    backward_s: float = 0.0
    encode_s: float = 0.0
    serve_s: float = 0.0
    inside_s: float = 0.0
    wire_s: float = 0.0
    first_part: float = 0.5
    buckets: int = 1

    @property
    def one_by_one_s(self) -> float:
        """Were nothing done beside anything else."""
        return self.head_s + self.backward_s + self.encode_s + self.serve_s + self.inside_s + self.wire_s


class _Tasks:
    """Tasks in order of their making, each with the resource it needs and the one task that it waits for."""

    def __init__(self) -> None:
        self.needs: list[int] = []
        self.seconds: list[float] = []
        self.after: list[list[int]] = []
        self.first: list[int] = []

    def add(self, resource: int, seconds: float, before: int | None) -> int | None:
        """Its number; of a task of no time that of the one before it, so that it is left out."""
        if seconds <= 0:
            return before
        number = len(self.seconds)
        self.needs.append(resource)
        self.seconds.append(seconds)
        self.after.append([])
        (self.first if before is None else self.after[before]).append(number)
        return number


def finished_s(course: Course) -> float:
    """When the last task is done. Equal courses take equally long to the last bit."""
    if course.buckets <= MOST_BUCKETS:
        return _in_buckets(course, course.buckets)
    few, many = (_in_buckets(course, buckets) for buckets in (MOST_BUCKETS // 2, MOST_BUCKETS))
    slope = (few - many) * MOST_BUCKETS
    return many + slope * (1 / course.buckets - 1 / MOST_BUCKETS)


def _in_buckets(course: Course, buckets: int) -> float:
    tasks = _Tasks()
    made = tasks.add(PROCESSOR, course.head_s, None)
    parts = (
        (PROCESSOR, course.encode_s / buckets),
        (INSIDE, course.inside_s / 2 / buckets),
        (WIRE, course.first_part * course.wire_s / buckets),
        (PROCESSOR, course.serve_s / buckets),
        (WIRE, (1 - course.first_part) * course.wire_s / buckets),
        (INSIDE, course.inside_s / 2 / buckets),
    )
    for _ in range(buckets):
        made = at = tasks.add(PROCESSOR, course.backward_s / buckets, made)
        for resource, seconds in parts:
            at = tasks.add(resource, seconds, at)
    return _run(tasks)


def _run(tasks: _Tasks) -> float:
    ready: tuple[deque[int], ...] = tuple(deque() for _ in range(RESOURCES))
    under_way: list[tuple[float, int]] = []
    is_free = [True] * RESOURCES
    for number in tasks.first:
        ready[tasks.needs[number]].append(number)
    now = 0.0
    while True:
        for resource in range(RESOURCES):
            if is_free[resource] and ready[resource]:
                number = ready[resource].popleft()
                is_free[resource] = False
                heappush(under_way, (now + tasks.seconds[number], number))
        if not under_way:
            return now
        now, done = heappop(under_way)
        is_free[tasks.needs[done]] = True
        for number in tasks.after[done]:
            ready[tasks.needs[number]].append(number)
