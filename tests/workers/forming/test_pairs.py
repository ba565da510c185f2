"""The pair check on threads of one process: real sockets, and a membership that the test plays."""

import asyncio
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from thinwire.workers.forming.pairs import Door, Pairs, Patience
from thinwire.workers.membership.seats import Identity, Seat, Seated, Standing
from thinwire.workers.membership.state import GenerationOver

SECRET = "sixteen-characters-or-more"
PORT = 4711
HASTY = Patience(connect_s=0.2, answer_s=0.2, hello_s=0.2, again_s=0.1)
LIMIT_S = 120.0
"""For what comes in a second where the machine is idle."""


class Generation:
    """The members of one generation and their doors. `over` is the membership's word, `told` what it was told."""

    def __init__(self, *secrets):
        self.doors = [Door("127.0.0.1", secret) for secret in secrets]
        self.over, self.told, self.heard = None, {}, threading.Condition()
        self._pool = ThreadPoolExecutor(len(secrets))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.over = self.over or "the test is over"
        self._pool.shutdown()
        for door in self.doors:
            door.close()

    def prove(self, *ranks, patience=None, generation=7):
        """Let these ranks begin; their futures."""
        identities = [Identity(f"id-{r}", r, "127.0.0.1", 1, port=door.port) for r, door in enumerate(self.doors)]
        members = tuple(Seated(identity, Standing(None, None, 0, False)) for identity in identities)

        def one(rank):
            def tell(unreachable):
                with self.heard:
                    self.told[rank] = unreachable
                    self.heard.notify_all()

            seat = Seat(generation, rank, len(members), members, "test", ())
            return Pairs(seat, self.doors[rank], lambda: self.over, tell, patience).prove(PORT if rank == 0 else 0)

        return [self._pool.submit(one, rank) for rank in ranks]

    def until_told(self, told, words="", pair=()):
        """told: of whom each rank tells. words: what the first of the pair says of the second, though not at once: a
        report may come before it knows."""

        def is_told():
            of_whom = {rank: set(said) for rank, said in self.told.items()}
            return of_whom == told and (not pair or words in self.told[pair[0]][pair[1]])

        with self.heard:
            assert self.heard.wait_for(is_told, LIMIT_S), self.told


def test_all_prove_each_other_and_learn_the_port_of_rank_0():
    with Generation(*[SECRET] * 4) as generation:
        for _ in range(2):  # the doors stay open for the next generation
            assert [one.result(LIMIT_S) for one in generation.prove(0, 1, 2, 3)] == [PORT] * 4
        assert generation.told == {}


def test_strangers_neither_pass_nor_hold_anybody_up():
    with Generation(*[SECRET] * 2) as generation:
        strangers = [socket.create_connection(("127.0.0.1", door.port)) for door in generation.doors * 40]
        for number, stranger in enumerate(strangers[::2]):  # every other one only hangs
            stranger.sendall(os.urandom(1 + number * 10))
        assert [one.result(LIMIT_S) for one in generation.prove(0, 1)] == [PORT] * 2
        for stranger in strangers:
            stranger.close()


def test_strangers_that_only_hang_keep_no_peer_out():
    with Generation(*[SECRET] * 2) as generation:
        strangers = [socket.create_connection(("127.0.0.1", door.port)) for door in generation.doors * 80]
        assert [one.result(LIMIT_S) for one in generation.prove(0, 1, patience=Patience(hello_s=600.0))] == [PORT] * 2
        for stranger in strangers:
            stranger.close()


def test_whoever_does_not_know_the_secret_is_told_of_and_does_not_pass():
    with Generation(SECRET, SECRET, "another-secret-of-16-or-more") as generation:
        futures = generation.prove(0, 1, 2, patience=HASTY)
        generation.until_told({0: {2}, 1: {2}, 2: {0, 1}}, "does not know the secret of this job", pair=(0, 2))
        assert "w2 at 127.0.0.1:" in generation.told[0][2]
        assert not any(future.done() for future in futures)


@pytest.mark.parametrize("state", ["closed", "deaf"])
def test_who_cannot_be_reached_is_told_of_and_the_word_of_the_membership_ends_it(state):
    with Generation(*[SECRET] * 3) as generation:
        if state == "closed":
            generation.doors[2].close()
        futures = generation.prove(0, 1, patience=HASTY)
        why = "Connect call failed" if state == "closed" else "did not answer within 0.2 s"
        generation.until_told({0: {2}, 1: {2}}, why, pair=(1, 2))
        assert not any(future.done() for future in futures)
        generation.over = "rank 2 was lost"
        for future in futures:
            with pytest.raises(GenerationOver, match="generation 7 is over: rank 2 was lost"):
                future.result(LIMIT_S)


def test_nobody_goes_on_while_one_pair_is_not_proved_and_all_do_when_it_heals():
    with Generation(*[SECRET] * 3) as generation:
        door, generation.doors[2] = generation.doors[2], Door("127.0.0.1", "another-secret-of-16-or-more")
        port = generation.doors[2].port
        futures = generation.prove(0, 1, patience=HASTY)
        generation.until_told({0: {2}, 1: {2}})
        generation.doors[2].close()
        door.close()
        generation.doors[2] = _door_at(port)
        assert [one.result(LIMIT_S) for one in [*futures, *generation.prove(2, patience=HASTY)]] == [PORT] * 3


def test_a_try_whose_first_frame_was_lost_is_given_up_for_another_long_before_anybody_is_told(monkeypatch):
    """As in a cut of just over 3 s: TCP's next try is 7 s after the first, and the membership is told after 5."""
    connect, tried = asyncio.open_connection, set()

    async def loses_the_first(*address, **options):
        if address not in tried:
            tried.add(address)
            await asyncio.Event().wait()
        return await connect(*address, **options)

    monkeypatch.setattr(asyncio, "open_connection", loses_the_first)
    with Generation(SECRET, SECRET) as generation:
        both = generation.prove(0, 1, patience=Patience(connect_s=600.0, try_s=0.05))
        assert [one.result(LIMIT_S) for one in both] == [PORT] * 2
        assert generation.told == {}


def test_who_comes_of_another_generation_does_not_pass():
    with Generation(*[SECRET] * 2) as generation:
        late = generation.prove(1, patience=HASTY, generation=6)
        generation.prove(0, patience=HASTY, generation=7)
        generation.until_told({0: {1}, 1: {0}})
        assert not late[0].done()


def _door_at(port):
    door = Door("127.0.0.1", SECRET)
    door.listener.close()
    door.listener, door.port = socket.create_server(("127.0.0.1", port)), port
    return door
