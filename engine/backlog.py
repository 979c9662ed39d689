"""Stream messages that wait for a slow reader.

The Deltas of one output are merged while they wait, so what waits per request is Accepted, one Delta per output and
Finished, however long the reader stays away. Both ends of the socket use it: the engine for a gateway worker that does
not read, the worker for a client that does not.
"""

from __future__ import annotations

from engine.protocol import Accepted, Delta, Finished, TokenLogprob

StreamMessage = Accepted | Delta | Finished


class _MergedDelta:
    """Two or more Deltas of one output, joined in linear time."""

    __slots__ = ("latest", "logprobs", "token_ids")

    def __init__(self, first: Delta) -> None:
        self.token_ids: list[int] = list(first.token_ids)
        self.logprobs: list[TokenLogprob] = list(first.logprobs)
        self.latest = first

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.latest = delta

    def delta(self) -> Delta:
        last = self.latest
        return Delta(
            last.request_id,
            last.output_index,
            tuple(self.token_ids),
            last.n_tokens,
            last.finish_reason,
            last.stop_token_id,
            tuple(self.logprobs),
        )


class Backlog:
    """A queue of stream messages. Per request the order is kept; between requests it may change by merging."""

    def __init__(self) -> None:
        self._entries: list[StreamMessage | _MergedDelta] = []
        self._delta_at: dict[tuple[str, int], int] = {}
        self._weights: dict[str, int] = {}

    def __len__(self) -> int:
        """Entries, merged ones counted once."""
        return len(self._entries)

    def put(self, message: StreamMessage) -> int:
        """Add one message. Returns what now waits for its request: token ids, and alternatives of logprobs."""
        if not isinstance(message, Delta):
            self._entries.append(message)
            return self._weights.get(message.request_id, 0)
        key = (message.request_id, message.output_index)
        at = self._delta_at.get(key)
        if at is None:
            self._delta_at[key] = len(self._entries)
            self._entries.append(message)
        else:
            waiting = self._entries[at]
            if isinstance(waiting, Delta):
                waiting = self._entries[at] = _MergedDelta(waiting)
            assert isinstance(waiting, _MergedDelta)
            waiting.add(message)
        weight = self._weights.get(message.request_id, 0) + len(message.token_ids)
        weight += sum(len(logprob.top) for logprob in message.logprobs)
        self._weights[message.request_id] = weight
        return weight

    def take(self) -> list[StreamMessage]:
        """Everything that waits; the backlog is empty afterwards."""
        entries = self._entries
        self._entries, self._delta_at, self._weights = [], {}, {}
        return [entry.delta() if isinstance(entry, _MergedDelta) else entry for entry in entries]
