"""Probes from another thread while the store changes."""

from __future__ import annotations

import sys
import threading

from tests.radix_cache.harness import A, FakeEngine, ids


def test_a_probe_sees_whole_states_only() -> None:
    """Between changes the resident part of the prompt is 0 or 12 or 16 tokens; anything else would be a torn read."""
    one = FakeEngine(8, 4)
    prompt = ids(*range(17))
    seen: set[int] = set()
    failures: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                seen.add(one.cache.probe(A, prompt).cached_tokens)
                one.cache.check_invariants()
                one.cache.stats()
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            one.serve(A, list(range(12)))
            one.serve(A, list(range(16)))
            one.cache.flush()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures
    assert seen <= {0, 12, 16}
