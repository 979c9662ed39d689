"""POST /v1/chat/completions and /v1/completions: translations to the core's requests and from its events."""

from __future__ import annotations

import asyncio
import functools
import operator
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import auth
from gateway.accounting import Usage
from gateway.api.bodies import read_object
from gateway.api.openai_messages import template_messages
from gateway.api.openai_requests import ChatBody, CommonBody, CompletionBody, prompts_of, read, sampling
from gateway.api.openai_shapes import DONE, ChatShapes, Choice, CompletionShapes, Shapes
from gateway.core import Completed, Core, Event, Generation, GenerationRequest, OutputFinished, TextDelta, check_length
from gateway.errors import ApiError
from gateway.middleware import request_id_of
from gateway.served import ServedModel
from gateway.services import Services, services_of
from gateway.sse import ClientStalled, ClientWatch, EventStream, event

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]


async def chat_completions(request: Request) -> Answer:
    services = services_of(request)
    principal = await auth.tenant(request, services.registry)
    call = read(await read_object(request), ChatBody, request.headers.get("x-cache-salt"))
    messages = template_messages(call.messages)
    model = services.models.get(call.model)
    hello = model.hello
    prompts = await model.prompts()
    ids = await prompts.chat(messages)
    check_length(len(ids), hello.max_model_len, "messages")
    call_id = f"chatcmpl-{secrets.token_hex(12)}"
    generation = GenerationRequest(
        id=call_id,
        x_request_id=request_id_of(request.scope),
        principal=principal,
        model=model,
        prompts=prompts,
        prompt_ids=ids.tobytes(),
        sampling=sampling(call, hello, len(ids)),
        n=call.n,
        stops=call.stops,
        salt=call.cache_salt or "",
        use_cache=call.use_cache,
    )
    shapes = ChatShapes(
        call_id, int(time.time()), model.name, _fingerprint(model), call.include_usage, prompts.tokenizer
    )
    return _answer(services, call, shapes, [generation])


async def completions(request: Request) -> Answer:
    services = services_of(request)
    principal = await auth.tenant(request, services.registry)
    call = read(await read_object(request), CompletionBody, request.headers.get("x-cache-salt"))
    model = services.models.get(call.model)
    hello = model.hello
    prompts = await model.prompts()
    given = prompts_of(call, hello.vocab_size)
    call_id = f"cmpl-{secrets.token_hex(12)}"
    generations = []
    for index, prompt in enumerate(given):
        ids = await prompts.text(prompt) if isinstance(prompt, str) else prompt
        check_length(len(ids), hello.max_model_len, "prompt" if len(given) == 1 else f"prompt[{index}]")
        generations.append(
            GenerationRequest(
                # Several prompts in one call are as many requests to the engine and in the ledger.
                id=call_id if len(given) == 1 else f"{call_id}-{index}",
                x_request_id=request_id_of(request.scope),
                principal=principal,
                model=model,
                prompts=prompts,
                prompt_ids=ids.tobytes(),
                sampling=sampling(call, hello, len(ids)),
                n=call.n,
                stops=call.stops,
                salt=call.cache_salt or "",
                use_cache=call.use_cache,
            )
        )
    shapes = CompletionShapes(
        call_id, int(time.time()), model.name, _fingerprint(model), call.include_usage, prompts.tokenizer
    )
    return _answer(services, call, shapes, generations)


def _fingerprint(model: ServedModel) -> str:
    """Changes with the weights and their precision."""
    return f"fp_{model.hello.revision[:12]}"


def _answer(services: Services, call: CommonBody, shapes: Shapes, requests: Sequence[GenerationRequest]) -> Answer:
    headers = [(b"x-radixgate-ignored", ", ".join(call.ignored).encode())] if call.ignored else []
    kind = StreamedAnswer if call.stream else WholeAnswer
    return kind(services.core, requests, shapes, headers, call.include_usage)


@dataclass
class _Answer:
    core: Core
    requests: Sequence[GenerationRequest]
    shapes: Shapes
    headers: list[tuple[bytes, bytes]]
    include_usage: bool

    async def _begin(self, stack: AsyncExitStack) -> list[Generation]:
        return [await stack.enter_async_context(await self.core.begin(request)) for request in self.requests]


class WholeAnswer(_Answer):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            generations = await self._begin(stack)
            choices = [Choice() for generation in generations for _ in range(generation.request.n)]
            usages: list[Usage] = []
            async with ClientWatch(receive, lambda: _cancel(generations)):
                async for index, item in _merged(generations):
                    if isinstance(item, TextDelta):
                        choices[index].text.append(item.text)
                        choices[index].logprobs += item.logprobs
                    elif isinstance(item, OutputFinished):
                        choices[index].finish_reason = item.finish_reason
                    elif isinstance(item, Completed):
                        usages.append(item.usage)
            usage = _total(usages)
            if usage is None:
                return
            response = Response(self.shapes.whole(choices, usage), media_type="application/json")
            response.raw_headers += [*self.headers, _cost_header(usage)]
            await response(scope, receive, send)


class StreamedAnswer(_Answer):
    """Errors before the first byte keep their HTTP status; later ones are the stream's last event."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            generations = await self._begin(stack)
            watch = ClientWatch(receive, lambda: _cancel(generations))
            async with EventStream(send, self.headers) as stream, watch:
                try:
                    usage = await self._write_events(stream, generations)
                    if usage is not None:
                        end = self.shapes.usage(usage) if self.include_usage else b""
                        await stream.end(end + DONE)
                except ClientStalled as stalled:
                    _cancel(generations)
                    raise ApiError(408, "slow_client", str(stalled)) from None
                except ApiError as error:
                    if not stream.opened:
                        raise
                    await stream.end(event(error.json()))

    async def _write_events(self, stream: EventStream, generations: Sequence[Generation]) -> Usage | None:
        """None when the client left."""
        begun: set[int] = set()
        usages: list[Usage] = []
        async for index, item in _merged(generations):
            if isinstance(item, Completed):
                usages.append(item.usage)
                continue
            if not isinstance(item, TextDelta | OutputFinished):
                continue
            data = b"" if index in begun else self.shapes.first(index)
            begun.add(index)
            if isinstance(item, TextDelta):
                data += self.shapes.text(index, item.text, item.logprobs)
            else:
                data += self.shapes.finish(index, item.finish_reason)
            await stream.write(data)
            for generation in generations:
                generation.delivered()
        return _total(usages)


def _cancel(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.cancel()


def _total(usages: Sequence[Usage]) -> Usage | None:
    """None when a generation ended without one: its client left."""
    return functools.reduce(operator.add, usages) if usages else None


def _cost_header(usage: Usage) -> tuple[bytes, bytes]:
    return (b"x-radixgate-cost-nano-usd", str(usage.cost_nano_usd).encode())


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Event]]:
    """Every event with the index of its choice: a call's prompts follow each other, n choices each."""
    if len(generations) == 1:
        async for item in generations[0]:
            yield getattr(item, "output_index", 0), item
        return
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue(maxsize=len(generations))

    async def pump(first_index: int, generation: Generation) -> None:
        try:
            async for item in generation:
                await queue.put((first_index + getattr(item, "output_index", 0), item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    first_indexes = [sum(g.request.n for g in generations[:position]) for position in range(len(generations))]
    pumps = [
        asyncio.create_task(pump(at, generation)) for at, generation in zip(first_indexes, generations, strict=True)
    ]
    try:
        running = len(pumps)
        while running:
            entry = await queue.get()
            if isinstance(entry, BaseException):
                raise entry
            if entry is None:
                running -= 1
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
]
