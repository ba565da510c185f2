"""A step as events: against what can be worked out by hand, and what must hold for any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.wire.pipeline import MOST_BUCKETS, Course, finished_s


def closed_form(course):
    """Of backward and a wire alone."""
    hidden = (1 - 1 / course.buckets) * min(course.backward_s, course.wire_s)
    return course.head_s + course.backward_s + course.wire_s - hidden


seconds = st.floats(0, 10.0)
courses = st.builds(
    Course, seconds, seconds, seconds, seconds, seconds, seconds, st.floats(0, 1), st.integers(1, MOST_BUCKETS)
)


@given(seconds, seconds, seconds, st.floats(0, 1), st.integers(1, 300))
def test_with_backward_and_a_wire_alone_events_are_the_formula(head_s, backward_s, wire_s, first, buckets):
    course = Course(head_s, backward_s, wire_s=wire_s, first_part=first, buckets=buckets)
    assert finished_s(course) == pytest.approx(closed_form(course), rel=1e-9, abs=1e-12)


@given(courses)
def test_no_step_is_shorter_than_its_busiest_resource_nor_longer_than_all_one_by_one(course):
    found = finished_s(course)
    processor_s = course.head_s + course.backward_s + course.encode_s + course.serve_s
    assert found >= max(processor_s, course.wire_s, course.inside_s) * (1 - 1e-9)
    assert found <= course.one_by_one_s * (1 + 1e-9)


@given(courses)
def test_one_bucket_has_nothing_beside_it(course):
    alone = Course(*(getattr(course, name) for name in Course.__slots__[:-1]))
    assert alone.buckets == 1
    assert finished_s(alone) == pytest.approx(course.one_by_one_s)


def test_two_buckets_by_hand():
    """Backward 1 + 1, encode 1 + 1 on one processor; the wire takes 4 for each, in two halves with 1 to serve between.

    Bucket 1: made at 1, encoded at 2, crosses 2 to 4; bucket 2: made at 3, encoded at 4, crosses 4 to 6. Bucket 1 is
    served 4 to 5 and crosses back 6 to 8, bucket 2 is served 6 to 7 and crosses back 8 to 10.
    """
    assert finished_s(Course(0.0, 2.0, 2.0, 2.0, wire_s=8.0, buckets=2)) == 10.0


def test_in_a_box_the_halves_of_the_exchange_pass_beside_the_wire():
    """Half of 2 s before and after; four buckets: 0.25 s in, 1 s across for each of the four, 0.25 s out."""
    assert finished_s(Course(0.0, inside_s=2.0, wire_s=4.0, buckets=4)) == pytest.approx(0.25 + 4.0 + 0.25)


def test_many_buckets_come_to_what_they_would_one_by_one():
    """Of more than are gone through a step takes a + b / K."""
    few = Course(1.0, 3.0, wire_s=2.0, buckets=MOST_BUCKETS)
    many = Course(1.0, 3.0, wire_s=2.0, buckets=2 * MOST_BUCKETS)
    assert finished_s(few) - finished_s(many) == pytest.approx(2.0 / MOST_BUCKETS / 2)
