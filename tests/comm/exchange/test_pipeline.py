"""Stages run in order, the first error ends them, and a thread ends with its pipeline."""

import gc
import threading

import pytest

from thinwire.comm.exchange.pipeline import Pipeline, ThreadPipeline

PIPELINES = {"at once": Pipeline, "behind": lambda: Pipeline(lag=2), "thread": ThreadPipeline}


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_run_in_order_and_all_of_them_before_drain_returns(name):
    pipeline, seen = PIPELINES[name](), []
    for turn in range(2):
        for k in range(5):
            pipeline.submit(seen.append, 10 * turn + k)
        assert pipeline.drain() is None
        assert seen == [10 * t + k for t in range(turn + 1) for k in range(5)]


@pytest.mark.parametrize("name", PIPELINES)
def test_after_an_error_nothing_runs_until_drain_has_handed_it_over(name):
    pipeline, seen = PIPELINES[name](), []

    def stage(k):
        if k >= 2:
            raise KeyError(k)
        seen.append(k)

    for k in range(4):
        pipeline.submit(stage, k)
    error = pipeline.drain()
    assert isinstance(error, KeyError)
    assert error.args == (2,)
    assert seen == [0, 1]
    assert not pipeline.failed
    pipeline.submit(stage, 1)
    assert pipeline.drain() is None
    assert seen == [0, 1, 1]


def test_a_caller_behind_runs_a_stage_when_more_than_its_lag_wait():
    pipeline, seen = Pipeline(lag=1), []
    pipeline.submit(seen.append, 0)
    assert seen == []
    pipeline.submit(seen.append, 1)
    assert seen == [0]


def test_the_thread_runs_beside_the_caller_and_ends_with_the_pipeline():
    pipeline, go_on, ran_by = ThreadPipeline(), threading.Event(), []
    pipeline.submit(lambda k: (go_on.wait(60), ran_by.append(threading.current_thread())), 0)
    go_on.set()
    assert pipeline.drain() is None
    (thread,) = ran_by
    assert thread is not threading.current_thread()
    assert thread.daemon
    del pipeline
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
