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
from gateway.api import openai_caching
from gateway.api.bodies import read_object
from gateway.api.openai_messages import conversation_messages
from gateway.api.openai_requests import ChatBody, CommonBody, CompletionBody, prompts_of, read, sampling
from gateway.api.openai_shapes import DONE, ChatShapes, Choice, CompletionShapes, Head, Shapes
from gateway.api.openai_tools import choice_of, has_strict, tools_of
from gateway.conversation import Conversation
from gateway.core import Completed, Core, Event, Generation, GenerationRequest, Started, check_length
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
    tools = tools_of(call.tools)
    conversation, is_cached = openai_caching.apply(
        Conversation(
            messages=conversation_messages(call.messages),
            tools=tools,
            tool_choice=choice_of(call.tool_choice, tools),
            parallel_tool_calls=call.parallel_tool_calls,
            reasoning_effort=call.reasoning_effort,
            add_generation_prompt=call.add_generation_prompt is not False,
            continue_final_message=call.continue_final_message,
            template_variables=call.chat_template_kwargs,
        ),
        call.prompt_cache_options,
    )
    if has_strict(call.tools):
        call.ignored = (*call.ignored, "tools.strict")
    model = services.models.get(call.model)
    hello = model.hello
    prompts = await model.prompts()
    salt = call.cache_salt or ""
    prompt = await prompts.render(
        conversation, tenant_id=principal.tenant_id, salt=salt, max_model_len=hello.max_model_len
    )
    check_length(len(prompt.ids), hello.max_model_len, "messages")
    call_id = f"chatcmpl-{secrets.token_hex(12)}"
    generation = GenerationRequest(
        id=call_id,
        x_request_id=request_id_of(request.scope),
        principal=principal,
        model=model,
        prompts=prompts,
        prompt_ids=prompt.ids.tobytes(),
        breakpoints=prompt.breakpoints,
        output_format=prompt.output_format,
        sampling=sampling(call, hello, len(prompt.ids)),
        n=call.n,
        stops=call.stops,
        salt=salt,
        use_cache=call.use_cache and is_cached,
    )
    shapes = ChatShapes(_head(call_id, model, call), call.include_usage, prompts.tokenizer)
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
        param = "prompt" if len(given) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            ids = await prompts.text(
                prompt,
                tenant_id=principal.tenant_id,
                salt=call.cache_salt or "",
                param=param,
                max_model_len=hello.max_model_len,
            )
        else:
            ids = prompt
        check_length(len(ids), hello.max_model_len, param)
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
    shapes = CompletionShapes(_head(call_id, model, call), call.include_usage, prompts.tokenizer)
    return _answer(services, call, shapes, generations)


def _head(call_id: str, model: ServedModel, call: CommonBody) -> Head:
    # The fingerprint changes with the weights and their precision.
    return Head(call_id, int(time.time()), model.name, f"fp_{model.hello.revision[:12]}", call.service_tier)


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
            ends: list[Completed] = []
            async with ClientWatch(receive, lambda: _cancel(generations)):
                async for index, item in _merged(generations):
                    if isinstance(item, Completed):
                        ends.append(item)
                    elif not isinstance(item, Started):
                        choices[index].add(item)
            completed = _total(ends)
            if completed is None:
                return
            response = Response(self.shapes.whole(choices, completed), media_type="application/json")
            response.raw_headers += [*self.headers, _cost_header(completed)]
            await response(scope, receive, send)


class StreamedAnswer(_Answer):
    """Errors before the first byte keep their HTTP status; later ones are the stream's last event."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            generations = await self._begin(stack)
            watch = ClientWatch(receive, lambda: _cancel(generations))
            async with EventStream(send, self.headers) as stream, watch:
                try:
                    completed = await self._write_events(stream, generations)
                    if completed is not None:
                        end = self.shapes.usage(completed) if self.include_usage else b""
                        await stream.end(end + DONE)
                except ClientStalled as stalled:
                    _cancel(generations)
                    raise ApiError(408, "slow_client", str(stalled)) from None
                except ApiError as error:
                    if not stream.opened:
                        raise
                    await stream.end(event(error.json()))

    async def _write_events(self, stream: EventStream, generations: Sequence[Generation]) -> Completed | None:
        """None when the client left."""
        begun: set[int] = set()
        ends: list[Completed] = []
        async for index, item in _merged(generations):
            if isinstance(item, Completed):
                ends.append(item)
                continue
            if isinstance(item, Started):
                continue
            data = b"" if index in begun else self.shapes.first(index, item)
            begun.add(index)
            await stream.write(data + self.shapes.event(index, item))
            for generation in generations:
                generation.delivered()
        return _total(ends)


def _cancel(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.cancel()


def _total(ends: Sequence[Completed]) -> Completed | None:
    """None when a generation ended without one: its client left."""
    if not ends:
        return None
    usage = functools.reduce(operator.add, [end.usage for end in ends])
    return Completed(usage, sum(end.reasoning_tokens for end in ends))


def _cost_header(completed: Completed) -> tuple[bytes, bytes]:
    return (b"x-radixgate-cost-nano-usd", str(completed.usage.cost_nano_usd).encode())


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
