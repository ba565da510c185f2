"""Ranks that would misread each other are told so at the start, all alike, with both sides in words."""

import dataclasses
import time

import pytest
import torch

from tests.comm.exchange.plain import plain
from thinwire.comm import PeerLost, SoloGroup, WireMismatch, run_threads
from thinwire.comm.codecs import Bf16Codec, SignCodec
from thinwire.comm.groups import texts
from thinwire.comm.groups.texts import FACTS_BYTES, agree, exchange_facts
from thinwire.comm.layout import Buckets, VectorLayout

LAYOUT = VectorLayout(24, ((0, 13), (16, 24)), ((0, 16), (16, 24)))


def messages(size, facts_of, like_of=lambda rank: torch.zeros(1)):
    """What each rank is told; None where it agrees."""

    def work(group):
        try:
            agree(group, facts_of(group.rank), like_of(group.rank))
        except WireMismatch as error:
            return str(error)
        return None

    return run_threads(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_that_agree_are_told_nothing_and_send_one_text(size):
    def work(group):
        agree(group, exchange_facts(LAYOUT, SignCodec(), Buckets.cut(LAYOUT, 8)), torch.zeros(1))
        return group.stats.sent_bytes, group.stats.collectives

    assert run_threads(size, work) == [(FACTS_BYTES * (size - 1), 1)] * size


@pytest.mark.parametrize(
    ("facts", "others", "told"),
    [
        (exchange_facts(LAYOUT, SignCodec()), exchange_facts(LAYOUT, SignCodec(64, "l1")), "codec sign:64:l1"),
        (exchange_facts(LAYOUT, SignCodec()), exchange_facts(LAYOUT, Bf16Codec()), "codec bf16"),
        (exchange_facts(LAYOUT, SignCodec()), exchange_facts(VectorLayout.single(9), SignCodec()), "elements 16"),
        (exchange_facts(LAYOUT, SignCodec()), exchange_facts(VectorLayout.single(24), SignCodec()), "live elements 24"),
        (
            exchange_facts(VectorLayout(24, ((0, 8), (8, 21)), ((0, 24),)), SignCodec()),
            exchange_facts(VectorLayout(24, ((0, 13), (16, 24)), ((0, 24),)), SignCodec()),
            "layout #",
        ),
        (
            exchange_facts(LAYOUT, SignCodec(), Buckets.cut(LAYOUT, 24)),
            exchange_facts(LAYOUT, SignCodec(), Buckets.cut(LAYOUT, 8)),
            "buckets 3",
        ),
        (
            exchange_facts(LAYOUT, SignCodec(), Buckets.cut(LAYOUT, 16, cuts=[8])),
            exchange_facts(LAYOUT, SignCodec(), Buckets.cut(LAYOUT, 16, cuts=[16])),
            "cut #",
        ),
        (exchange_facts(LAYOUT, SignCodec(), Buckets.cut(LAYOUT)), exchange_facts(LAYOUT, SignCodec()), "buckets none"),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3, "d": 4}, "c 3"),
    ],
)
def test_what_differs_is_named_with_both_values_on_every_rank(facts, others, told):
    told_to = messages(3, lambda rank: others if rank == 2 else facts)
    assert len(set(told_to)) == 1
    assert told_to[0].startswith("ranks 0, 1 have ")
    assert f"rank 2 has {told}" in told_to[0]


def test_dtype_wire_version_and_package_version_are_facts_too(monkeypatch):
    assert (
        "rank 1 has dtype float64" in messages(2, lambda _: {}, lambda r: torch.zeros(1).to([None, torch.double][r]))[0]
    )
    facts = iter([1, 2])
    monkeypatch.setattr(texts, "_package_version", lambda: f"0.{next(facts)}")
    assert "thinwire version 0." in messages(2, lambda _: {})[0]
    monkeypatch.setattr(texts, "_package_version", lambda: "1")

    class Wire(int):
        def __str__(self):
            return str(next(versions))

    versions = iter([7, 8])
    monkeypatch.setattr(texts, "WIRE_VERSION", Wire())
    assert {"wire version 7" in m and "wire version 8" in m for m in messages(2, lambda _: {})} == {True}


def test_the_kind_of_device_is_a_fact():
    told = [{"device": "cpu"}, {"device": "cuda"}]
    with pytest.raises(WireMismatch, match="rank 0 has device cpu, rank 1 has device cuda"):
        texts.refuse_differing(told)


def test_long_values_that_differ_at_their_end_only_are_told_apart():
    told = messages(2, lambda rank: {"x": "a" * 5000 + str(rank), "y": "line\nbreak=sign"})
    assert "rank 0 has x aaaa" in told[0]
    assert messages(2, lambda rank: {"x": "a" * 5000}) == [None, None]


def test_more_facts_than_fit_are_refused_before_anything_is_sent():
    group = SoloGroup()
    with pytest.raises(ValueError, match=f"20 facts|24 facts.*at most {FACTS_BYTES}"):
        agree(group, {f"fact {i}": "x" * 70 for i in range(20)}, torch.zeros(1))


def test_a_codec_that_is_no_dataclass_is_known_by_its_fingerprint():
    class Plain:
        name = "plain"

        def fingerprint(self):
            return 0xABC

    assert not dataclasses.is_dataclass(Plain())
    assert exchange_facts(LAYOUT, Plain())["codec"] == "plain #00000abc"


def test_a_rank_that_never_comes_is_found_by_the_time_out():
    def work(group):
        if group.rank == 1:
            return None
        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 \(it did not come") as raised:
            plain(group, LAYOUT, SignCodec(), torch.zeros(1))
        assert time.monotonic() - began < 30
        return raised.value.rank

    assert run_threads(3, work, timeout_s=0.3)[0] == 1
