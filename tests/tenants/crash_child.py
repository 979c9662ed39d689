"""A gateway process that dies: books requests, then kills itself with SIGKILL at the place named on its command line.

Run as `python -m tests.tenants.crash_child <place> <data dir> <redis url>`. What the client was told goes to stdout,
one JSON object a line, before the kill.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tenants import segments, store
from tenants.ledger import Entry, Ledger
from tests.tenants.support import PROMPT, book, closing, opening

N_BOOKED = 20


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def stream(entry: Entry, n_tokens: int) -> None:
    """Hand over tokens one by one, as a stream does."""
    entry.admitted(PROMPT)
    entry.progress(0)
    for number in range(1, n_tokens + 1):
        tell(request_id=entry.request.request_id, delivered=number)
        entry.progress(number)
        await asyncio.sleep(0)


async def main(place: str, data_dir: Path, url: str) -> None:
    redis = store.connect(url)
    ledger = await Ledger.start(data_dir, redis)
    if place == "after_lua_before_cursor":
        send = ledger._shipper._send

        async def send_and_die(spool_id, batch):
            await send(spool_id, batch)
            die()

        ledger._shipper._send = send_and_die  # type: ignore[method-assign]
    for number in range(N_BOOKED):
        await book(ledger, f"booked {number}")
        tell(request_id=f"booked {number}", billed=10)
    entry = await ledger.open(opening("last"))
    tell(request_id="last", delivered=-1)
    if place == "after_open":
        die()
    await stream(entry, 50)
    if place == "mid_stream":
        # The group that carries the last PROGRESS reaches the file, without an fsync of its own.
        await ledger.open(opening("other"))
        die()
    if place == "before_fsync":
        segments.sync_file = lambda fd: die()
    await entry.close(closing(50))
    tell(request_id="last", billed=50)
    if place == "after_close":
        die()
    await ledger.shipped(10)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
