"""Threads for which the end of the process does not wait: of an event loop, and of one call."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a daemon thread; coroutines come from any thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[object, None, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self, last: Coroutine[object, None, object], *, wait_s: float) -> None:
        """Run a last coroutine and end the thread, which is waited for at most `wait_s`."""
        self.start(last).add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
        self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            with suppress(SystemExit):  # of one task: what awaits it gets the exit, and the other tasks run on
                self.loop.run_forever()
                break
        self.loop.run_until_complete(asyncio.sleep(0))  # what has just ended reaches those that wait for it
        self.loop.close()


def in_daemon_thread(call: Callable[[], T], *, name: str) -> Future[T]:
    """The result of a call that may hang."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    result.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return result


async def cancel_others() -> None:
    """Cancel all other tasks of the running loop and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
