"""A real engine process with a tiny random Llama: what a gateway and a supervisor see of it."""

import asyncio
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from array import array
from dataclasses import replace

import pytest

from engine.client import EngineClient
from engine.null import null_hello
from engine.protocol import Delta, Finished, Sampling, Submit, encode
from tests.engine.engine_process import ROOT, VOCAB_SIZE, EngineProcess, save_tiny_llama
from tests.engine.test_server import Peer

pytestmark = pytest.mark.anyio
BLOCKS = 400


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_dir):
    """One process for the tests that leave it as they found it."""
    with EngineProcess(model_dir, "--kv-blocks", BLOCKS) as process:
        process.wait_for("ready")
        yield process


def submit(request_id, prompt, max_tokens=8, owner="acme", **changes):
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    return replace(Submit(request_id, owner, array("i", prompt).tobytes(), sampling), **changes)


def prompt_of(n_tokens, seed):
    return [(seed * 31 + i * 7 + i * i) % VOCAB_SIZE for i in range(n_tokens)]


async def collect(stream):
    return [message async for message in stream]


def ids(messages, output=0):
    return [i for m in messages if isinstance(m, Delta) and m.output_index == output for i in m.token_ids]


@contextlib.asynccontextmanager
async def connected(engine, **options):
    async with EngineClient(engine.path, **options) as client:
        await client.wait_ready(30)
        yield client


async def settled(client):
    """The engine's stats, once nothing runs. Also checks the store's invariants."""
    while True:
        invariants = await client.query("invariants")
        assert invariants["ok"], invariants["error"]
        stats = await client.query("stats")
        if stats["running"] == stats["queue"] == 0:
            return stats
        await asyncio.sleep(0.01)


def assert_all_blocks_free_or_in_tree(stats):
    cache = stats["cache"]
    assert (cache["private_blocks"], cache["locked_blocks"]) == (0, 0)
    assert cache["free_blocks"] + cache["tree_blocks"] == cache["total_blocks"] == BLOCKS


async def test_hello_says_what_is_served(engine):
    async with connected(engine) as client:
        hello = client.hello
        assert (hello.model, hello.dtype, hello.device, hello.pid) == ("tiny", "float32", "cpu", engine.process.pid)
        assert (hello.block_size, hello.n_blocks, hello.max_model_len) == (16, BLOCKS, 4096)
        assert (hello.vocab_size, hello.eos_token_ids) == (VOCAB_SIZE, ())
        assert (await client.query("stats"))["boot_id"] == hello.boot_id


async def test_greedy_text_equals_transformers_and_the_second_time_it_is_cached(engine, model_dir):
    import torch
    from transformers import LlamaForCausalLM

    prompt = prompt_of(70, 1)
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 70:].tolist()
    async with connected(engine) as client:
        assert await client.probe("acme", array("i", prompt).tobytes()) == 0
        cold = await collect(client.submit(submit("cold", prompt, 12)))
        warm = await collect(client.submit(submit("warm", prompt, 12)))
        other = await collect(client.submit(submit("other", prompt, 12, owner="globex")))
        assert ids(cold) == ids(warm) == ids(other) == expected
        bills = [messages[-1].prompt for messages in (cold, warm, other)]
        assert [(bill.cached, bill.prompt) for bill in bills] == [(0, 70), (69, 70), (0, 70)]
        assert [messages[-1].finish_reasons for messages in (cold, warm, other)] == [("length",)] * 3
        assert await client.probe("acme", array("i", [*prompt, 1]).tobytes()) == 70
        assert await client.probe("initech", array("i", prompt).tobytes()) == 0


async def test_opting_out_neither_reads_nor_writes(engine):
    prompt = prompt_of(64, 2)
    async with connected(engine) as client:
        await collect(client.submit(submit("out", prompt, use_cache=False)))
        assert await client.probe("acme", array("i", prompt).tobytes()) == 0


async def test_two_connections_at_once_get_their_own_answers(engine):
    prompts = [prompt_of(40 + 8 * i, 10 + i) for i in range(8)]
    async with connected(engine) as one, connected(engine) as two:
        alone = [ids(await collect(one.submit(submit(f"alone-{i}", p, 20, owner="x")))) for i, p in enumerate(prompts)]
        streams = [
            (one, two)[i % 2].submit(submit(f"crowd-{i}", prompt, 20, owner="y")) for i, prompt in enumerate(prompts)
        ]
        crowd = await asyncio.gather(*map(collect, streams))
        assert [ids(messages) for messages in crowd] == alone
        assert_all_blocks_free_or_in_tree(await settled(one))


async def test_parallel_samples_are_told_apart(engine):
    async with connected(engine) as client:
        messages = await collect(client.submit(submit("n", prompt_of(30, 3), 6, n=3)))
        assert ids(messages, 0) == ids(messages, 1) == ids(messages, 2)
        assert messages[-1].output_tokens == (6, 6, 6)
        assert_all_blocks_free_or_in_tree(await settled(client))


async def test_cancel_ends_a_stream_with_the_tokens_it_got(engine):
    async with connected(engine) as client:
        stream = client.submit(submit("cancelled", prompt_of(50, 4), 4000))
        messages = []
        async for message in stream:
            messages.append(message)
            if isinstance(message, Delta):
                stream.cancel()
        assert (messages[-1].finish_reasons, messages[-1].error) == (("cancelled",), None)
        assert messages[-1].output_tokens == (len(ids(messages)),)
        assert_all_blocks_free_or_in_tree(await settled(client))


async def test_stop_bills_no_further_whenever_it_comes(engine):
    async with connected(engine) as client:
        for request_id, max_tokens in (("early", 4000), ("late", 4)):
            stream = client.submit(submit(request_id, prompt_of(50, 5), max_tokens))
            async for message in stream:
                if isinstance(message, Delta) and message.n_tokens >= 4:
                    stream.stop(0, 3)
            assert (message.output_tokens, message.finish_reasons) == ((3,), ("stop",))
        assert_all_blocks_free_or_in_tree(await settled(client))


async def test_a_connection_lost_in_mid_stream_gives_its_blocks_back(engine):
    async with connected(engine) as other:
        before = (await settled(other))["requests"]
        async with connected(engine) as leaver:
            streams = [leaver.submit(submit(f"left-{i}", prompt_of(100, 20 + i), 4000)) for i in range(4)]
            for stream in streams:
                async for message in stream:
                    if isinstance(message, Delta):
                        break
        stats = await settled(other)
        assert stats["requests"] == before + 4
        assert_all_blocks_free_or_in_tree(stats)


async def test_junk_closes_that_connection_and_no_other(engine):
    async with connected(engine) as client:
        stream = client.submit(submit("good", prompt_of(20, 6), 300))
        await anext(stream)
        for junk in (b"\xff" * 64, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", encode(null_hello())):
            peer = await asyncio.to_thread(Peer, engine.path)
            peer.sock.sendall(junk)
            assert await asyncio.to_thread(peer.hear) is None
        assert (await collect(stream))[-1].output_tokens == (300,)


async def test_a_client_that_does_not_read_is_bounded_and_harms_nobody(engine):
    stalled = await asyncio.to_thread(Peer, engine.path)
    sampling = Sampling(max_tokens=3000, temperature=0.0, logprobs=64)
    stalled.say(submit("stalled", prompt_of(20, 7), n=4, sampling=sampling))
    async with connected(engine) as client:
        assert (await collect(client.submit(submit("reads", prompt_of(20, 8), 50))))[-1].output_tokens == (50,)
        await settled(client)  # ended without one byte read by its client
        messages = await asyncio.to_thread(stalled.hear_streams, Finished)
        assert messages[-1].error.code == "slow_client"
        assert 0 < sum(messages[-1].output_tokens) < 4 * 3000
        assert messages[-1].output_tokens == tuple(len(ids(messages, output)) for output in range(4))
        assert_all_blocks_free_or_in_tree(await settled(client))


async def test_flush_empties_one_owners_part_of_the_tree(engine):
    prompt = prompt_of(64, 9)
    async with connected(engine) as client:
        for owner in ("flushed", "kept"):
            await collect(client.submit(submit(owner, prompt, 1, owner=owner)))
        assert await client.query("flush", {"owner": "flushed"}) == {"blocks": 4}
        assert await client.probe("flushed", array("i", prompt).tobytes()) == 0
        assert await client.probe("kept", array("i", prompt).tobytes()) == 63
        assert (await client.query("flush"))["blocks"] >= 4
        assert (await settled(client))["cache"]["free_blocks"] == BLOCKS


async def test_a_prompt_too_long_is_refused_by_name(engine):
    async with connected(engine) as client:
        (finished,) = await collect(client.submit(submit("long", prompt_of(4096, 1))))
        assert (finished.error.code, finished.prompt.prompt) == ("context_length_exceeded", 0)


async def test_the_counters_are_the_sum_of_what_was_told(engine):
    names = ("prompt_cached_private", "prompt_written_unleased", "prompt_uncached", "output_tokens")
    async with connected(engine) as client:
        before = await settled(client)
        finals = [
            (await collect(client.submit(submit(f"sum-{i}", prompt_of(30 + i % 2, 40), 5))))[-1] for i in range(4)
        ]
        after = await settled(client)
        told = (
            sum(final.prompt.cached_private for final in finals),
            sum(final.prompt.written_unleased for final in finals),
            sum(final.prompt.uncached for final in finals),
            sum(sum(final.output_tokens) for final in finals),
        )
        assert tuple(after[name] - before[name] for name in names) == told


@pytest.mark.parametrize("n_lost", [0, 3], ids=["", "and loses a worker"])
async def test_a_crowd_that_outgrows_the_pool_leaks_nothing_and_every_count_agrees(engine, n_lost):
    """Sixteen at once from two tenants over two connections, with shared prefixes, stops and cancels."""
    chance = random.Random(7)
    finals, texts = [], {}

    async def user(client, owner, number):
        for turn in range(4):
            family = chance.randrange(3)
            prompt = prompt_of(chance.randrange(200, 900), family)
            max_tokens, fate = chance.randrange(5, 60), chance.choice(["end", "end", "cancel", "stop"])
            stream = client.submit(submit(f"{owner}-{number}-{turn}", prompt, max_tokens, owner=owner))
            messages = []
            async for message in stream:
                messages.append(message)
                if fate == "cancel" and isinstance(message, Delta):
                    stream.cancel()
                if fate == "stop" and isinstance(message, Delta) and message.n_tokens >= 3:
                    stream.stop(0, 3)
            final = messages[-1]
            assert final.error is None, final.error
            bill = final.prompt
            assert 0 <= bill.cached <= len(prompt) - 1
            if fate != "cancel":
                assert bill.prompt == len(prompt)
                assert final.output_tokens[0] == (3 if fate == "stop" and max_tokens >= 3 else max_tokens)
            finals.append(final)
            text = ids(messages)[: final.output_tokens[0]]
            known = texts.setdefault((family, len(prompt)), text)
            assert text[: len(known)] == known[: len(text)], "the same prompt, the same greedy text"

    async with connected(engine) as one, connected(engine) as two:
        before = await settled(one)
        async with connected(engine) as lost:
            for number in range(n_lost):
                await anext(lost.submit(submit(f"lost-{number}", prompt_of(600, 50 + number), 3000, owner="a")))
            crowd = asyncio.gather(*(user((one, two)[i % 2], "ab"[i % 2], i) for i in range(16)))
            await asyncio.sleep(0)
        await crowd
        after = await settled(one)
        assert_all_blocks_free_or_in_tree(after)
        grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
        assert (grown["requests"], grown["failed_steps"]) == (len(finals) + n_lost, 0)
        assert after["cache"]["evicted_blocks"] > before["cache"]["evicted_blocks"]
        if not n_lost:  # what a lost worker was not told cannot be compared
            told = sum(sum(final.output_tokens) for final in finals)
            assert grown["output_tokens"] - grown["late_stop_tokens"] == told
            for name in ("cached_private", "cached_public", "written_unleased", "uncached"):
                assert grown[f"prompt_{name}"] == sum(getattr(final.prompt, name) for final in finals)


async def test_the_idle_engine_beats_and_costs_nothing(engine):
    async with connected(engine) as client:
        await settled(client)
    while not engine.lines.empty():
        engine.lines.get()
    assert {"waiting_s": 0.0, "queue": 0, "running": 0}.items() <= engine.wait_for("beat").items()
    if sys.platform == "linux":
        before = cpu_s(engine.process.pid)
        started_s = time.monotonic()
        engine.wait_for("beat")
        engine.wait_for("beat")
        assert cpu_s(engine.process.pid) - before <= 0.05 * (time.monotonic() - started_s)


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_killed_engine_ends_its_streams_and_the_next_one_serves(model_dir):
    deaths = []
    with EngineProcess(model_dir, "--kv-blocks", BLOCKS) as process:
        process.wait_for("ready")
        async with connected(process, on_death=deaths.append) as client:
            doomed = submit("doomed", prompt_of(40, 1), 4000)
            stream = client.submit(doomed)
            messages = [await anext(stream), await anext(stream)]
            process.signal(signal.SIGKILL)
            messages += await collect(stream)
            last = messages[-1]
            assert (last.error.code, last.prompt.prompt) == ("engine_died", 40)
            assert last.output_tokens == (len(ids(messages)),) != (0,)
            assert (deaths, client.hello) == ([[doomed]], None)


async def test_sigterm_drains(model_dir):
    with EngineProcess(model_dir, "--kv-blocks", BLOCKS) as process:
        process.wait_for("ready")
        async with connected(process) as client:
            stream = client.submit(submit("running", prompt_of(40, 1), 600))
            await anext(stream)
            process.terminate()
            while True:
                late = await collect(client.submit(submit("late", prompt_of(4, 1), 1)))
                if late[-1].error is not None:
                    break
            assert late[-1].error.code == "draining"
            last = (await collect(stream))[-1]
            assert (last.output_tokens, last.error) == ((600,), None)
            assert process.exit_code() == 0


async def test_a_drain_is_bounded(model_dir):
    with EngineProcess(model_dir, "--kv-blocks", BLOCKS, "--drain-s", 0.2) as process:
        process.wait_for("ready")
        async with connected(process) as client:
            stream = client.submit(submit("endless", prompt_of(40, 1), 4000))
            await anext(stream)
            process.terminate()
            last = (await collect(stream))[-1]
            assert (last.error.code, last.prompt.prompt) == ("draining", 40)
            assert process.exit_code() == 0


def test_the_engine_ends_when_its_parent_is_gone(model_dir):
    with EngineProcess(model_dir, "--kv-blocks", 8) as process:
        process.wait_for("ready")
        process.cut_lifeline()
        assert process.exit_code() == 0


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel's death signal is Linux's")
def test_even_a_stopped_engine_ends_when_its_parent_is_killed(tmp_path):
    parent_code = (
        "import os, subprocess, sys\n"
        "lifeline, held = os.pipe()\n"
        "command = [sys.executable, '-m', 'engine.process', '--lifeline-fd', str(lifeline), *sys.argv[1:]]\n"
        "child = subprocess.Popen(command, pass_fds=(lifeline,))\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    line = ["--model", "m", "--source", "/nowhere", "--data-dir", tmp_path, "--socket", tmp_path / "s"]
    command = [sys.executable, "-c", parent_code, *map(str, line)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)
        while "importing torch" not in parent.stderr.readline():
            pass
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert select.select([watched], [], [], 30)[0] == [watched]
        os.close(watched)


def test_stacks_are_dumped_on_demand(model_dir):
    with EngineProcess(model_dir, "--kv-blocks", 8) as process:
        process.wait_for("ready")
        process.signal(signal.SIGUSR1)
        process.wait_for("beat")
        process.terminate()
        assert process.exit_code() == 0
        stacks = process.stderr()
        assert 'stepper.py", line' in stacks, stacks


@pytest.mark.parametrize(
    ("source", "extra", "code", "words"),
    [
        ("/nowhere/model", (), "model_not_found", "/nowhere/model"),
        (None, ("--kv-blocks", 10**9), "kv_memory_too_small", "are free"),
        (None, ("--block-size", 0), "invalid_option", "--block-size"),
        (None, ("--device", "cuda"), "device_not_available", "--device cpu"),
    ],
)
def test_a_start_that_fails_says_why_with_exit_code_3(model_dir, source, extra, code, words):
    with EngineProcess(source or model_dir, *extra, env={"CUDA_VISIBLE_DEVICES": ""}) as process:
        assert process.exit_code() == 3
        process.stderr()
        failed = [line for line in process.lines.queue if line["type"] == "failed"]
        assert [line["code"] for line in failed] == [code]
        assert words in failed[0]["message"]
