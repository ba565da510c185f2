"""What many ask for at the same moment is asked once for all, by a call that begins after each of them asked."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from thinwire.service.once_for_all import OnceForAll


def test_whoever_asks_is_given_what_began_after_it_asked_and_few_calls_are_made() -> None:
    async def run() -> None:
        once: OnceForAll[str] = OnceForAll()
        begun = ended = 0

        async def call() -> int:
            nonlocal begun, ended
            begun += 1
            mine = begun
            for _ in range(5):
                await asyncio.sleep(0)
            assert begun == ended + 1, "two of one key were under way"
            ended += 1
            return mine

        async def ask(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            before = begun
            assert await once.of("key", call) > before

        await asyncio.gather(*(ask(turns % 40) for turns in range(400)))
        assert begun <= 9
        assert once.calls == begun
        assert not once._next
        assert not once._under_way

    asyncio.run(run())


def test_keys_do_not_wait_for_one_another_and_an_error_is_of_those_who_asked() -> None:
    async def run() -> None:
        once: OnceForAll[int] = OnceForAll()
        never = asyncio.Event()

        async def wrong() -> None:
            raise ValueError("no")

        async def right() -> int:
            return 1

        waiting = asyncio.create_task(once.of(1, never.wait))
        await asyncio.sleep(0)
        for found in await asyncio.gather(once.of(2, wrong), once.of(2, wrong), return_exceptions=True):
            assert isinstance(found, ValueError)
        assert await once.of(2, right) == 1
        # Who goes away takes nothing from the others.
        other = asyncio.create_task(once.of(1, right))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        never.set()
        assert await other == 1

    asyncio.run(run())


def test_two_loops_that_ask_at_once_have_calls_of_their_own() -> None:
    once: OnceForAll[str] = OnceForAll()
    both = threading.Barrier(2)

    async def call() -> asyncio.AbstractEventLoop:
        await asyncio.to_thread(both.wait, 60)  # neither ends before the other has begun
        return asyncio.get_running_loop()

    async def ask() -> bool:
        return await once.of("key", call) is asyncio.get_running_loop()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda _: asyncio.run(ask()), range(2))) == [True, True]
