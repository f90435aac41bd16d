"""Reservations of host memory: limits, order, and what cancelling leaves."""

import asyncio

from tests.server.fakes import in_loop
from tpu_vl.server.budget import ByteBudget


@in_loop
async def test_waiting_is_in_order_and_ends_when_bytes_are_free():
    budget = ByteBudget(100)
    first = await budget.reserve(80)
    large = asyncio.create_task(budget.reserve(90))
    small = asyncio.create_task(budget.reserve(10))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done()  # it would fit, but it came later
    first.shrink(75)
    await asyncio.sleep(0)
    assert not large.done()
    first.close()
    first.close()
    assert (await large).num_bytes == 90
    assert (await small).num_bytes == 10
    assert budget.used_bytes == 100


@in_loop
async def test_more_than_the_limit_waits_for_all_of_it():
    budget = ByteBudget(100)
    first = await budget.reserve(1)
    huge = asyncio.create_task(budget.reserve(1000))
    await asyncio.sleep(0)
    assert not huge.done()
    first.close()
    reservation = await huge
    assert reservation.num_bytes == 100
    reservation.shrink(1000)
    assert budget.used_bytes == 100


@in_loop
async def test_a_cancelled_wait_holds_nothing_and_blocks_nobody():
    budget = ByteBudget(100)
    first = await budget.reserve(60)
    waiting = asyncio.create_task(budget.reserve(100))
    behind = asyncio.create_task(budget.reserve(40))
    await asyncio.sleep(0)
    waiting.cancel()
    second = await behind
    first.close()
    granted = asyncio.create_task(budget.reserve(100))
    await asyncio.sleep(0)
    second.close()  # grants it; cancelled before it runs on
    granted.cancel()
    await asyncio.gather(granted, return_exceptions=True)
    assert budget.used_bytes == 0
