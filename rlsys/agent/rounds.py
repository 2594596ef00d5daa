"""Draws in rounds: when every open episode waits for the model, all their requests are completed in one batch.

What is drawn then follows from seeds, tokens and tool results alone, not from the time that a tool takes: the same run
gives the same tokens. In an epoch an episode only takes part while it has room for tokens.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlsys.types import ModelRequest, ModelResponse

Generate = Callable[[Sequence[ModelRequest]], Sequence[ModelResponse]]


class Rounds:
    """`sample` for episodes that run at most `max_concurrent` at once; belongs to one event loop.

    `generate` blocks and runs in a thread. `add` says how many more episodes there are, of which the last `num_spare`
    are cancelled, `end` that one has ended. With `rooms` an epoch begins: these episodes only draw while they have room
    in tokens.
    """

    def __init__(self, generate: Generate, *, max_concurrent: int) -> None:
        self._generate, self._max_concurrent = generate, max_concurrent
        self._num_left = self._num_spare = 0
        self._waiting: list[tuple[ModelRequest, asyncio.Future[ModelResponse]]] = []
        self._running: asyncio.Task[None] | None = None
        self._rooms: dict[str, float] = {}
        self._epoch: asyncio.Future[None] | None = None

    def add(self, num_episodes: int, rooms: Mapping[str, float] | None = None, num_spare: int = 0) -> None:
        self._num_left, self._num_spare = self._num_left + num_episodes, num_spare
        self._rooms = self._rooms if rooms is None else dict(rooms)

    def end(self) -> None:
        self._num_left -= 1
        self._start()

    async def end_epoch(self) -> None:
        """Until all episodes have ended or wait without room."""
        self._epoch = asyncio.get_running_loop().create_future()
        self._start()
        await self._epoch

    async def sample(self, request: ModelRequest) -> ModelResponse:
        """Complete a prompt with the next round; the order of sessions is that of the batch."""
        response: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, response))
        self._start()
        return await response

    def _start(self) -> None:
        self._waiting = [(request, response) for request, response in self._waiting if not response.done()]
        num_waiting = len({request.session for request, _ in self._waiting})
        if self._running is not None or num_waiting < min(self._num_left, self._max_concurrent):
            return
        if 0 < self._num_left <= self._num_spare:
            for _, response in self._waiting:
                response.cancel()
            return
        round_ = [draw for draw in self._waiting if self._rooms.get(draw[0].session, 1) > 0]
        if round_:
            self._running = asyncio.get_running_loop().create_task(self._run(round_))
        elif self._epoch is not None and not self._epoch.done():
            self._epoch.set_result(None)

    async def _run(self, round_: list[tuple[ModelRequest, asyncio.Future[ModelResponse]]]) -> None:
        round_.sort(key=lambda draw: draw[0].session)
        self._waiting = [draw for draw in self._waiting if draw not in round_]
        requests = [replace(request, rid=f"{n}", session="") for n, (request, _) in enumerate(round_)]
        try:
            responses = await asyncio.to_thread(self._generate, requests)
            for (request, future), response in zip(round_, responses, strict=True):
                if request.session in self._rooms:
                    self._rooms[request.session] -= len(response.output_tokens)
                if not future.done():
                    future.set_result(response)
        except BaseException as error:
            for _, future in round_:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._running = None
            self._start()
