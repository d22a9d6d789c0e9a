"""A batch's sessions, and the steps of its layers."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch

from ..client import Client
from ..config import SessionConfig
from ..errors import AttndError, SessionLost, make_error
from ..steps import Segment, StepTensors, segment_error, step_request
from . import wire
from .masks import NAME, MaskPlan
from .rows import RowPart, Rows, StepRows

# Most bytes of Q, K and V in one step; longer prompts go in several. Half of what both ends accept by default.
STEP_BYTES = 32 << 20
# Closing happens also while the interpreter ends or a server is gone: it must not take long.
CLOSE_TIMEOUT = 2.0


@dataclass(frozen=True)
class LayerKind:
    """What a session fixes at its creation. Layers of one kind share a session per row."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None
    sinks: tuple[float, ...] | None


@dataclass(frozen=True)
class RemoteOptions:
    """As ``RemoteCache`` takes them."""

    kv_dtype: str
    max_tokens: int | None
    ttl: float | None
    reserve_tokens: int


class Sessions:
    """The sessions of one cache: one per row and kind of layer. Owned by the process that made them."""

    def __init__(self, client: Client, num_layers: int, options: RemoteOptions) -> None:
        self._client = client
        self._num_layers = num_layers
        self._options = options
        self._pid = os.getpid()
        self._by_kind: dict[LayerKind, list[str]] = {}

    def of(self, kind: LayerKind, batch: int) -> list[str]:
        """The session ids of the rows, created at first use."""
        if kind not in self._by_kind:
            ids: list[str] = []
            try:
                for _ in range(batch):
                    ids.append(self._client.create_session(self._config(kind)).session_id)
            except BaseException:
                self._close_all(ids)
                raise
            self._by_kind[kind] = ids
        return self._by_kind[kind]

    def ids(self) -> list[str]:
        return [session_id for ids in self._by_kind.values() for session_id in ids]

    def reorder(self, sources: list[int]) -> None:
        for ids in self._by_kind.values():
            self._client.reorder(ids, sources)

    def close(self) -> None:
        """Frees them on the server. A server that does not answer keeps them until their time to live ends."""
        ids = self.ids() if self._pid == os.getpid() else []
        self._by_kind.clear()
        self._close_all(ids)

    def _close_all(self, ids: list[str]) -> None:
        for session_id in ids:
            try:
                with contextlib.suppress(SessionLost):
                    self._client.close_session(session_id, timeout=CLOSE_TIMEOUT)
            except AttndError:
                return

    def _config(self, kind: LayerKind) -> SessionConfig:
        return SessionConfig(
            num_layers=self._num_layers,
            num_q_heads=kind.num_q_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            value_dim=kind.value_dim,
            kv_dtype=self._options.kv_dtype,
            scale=kind.scale,
            softcap=kind.softcap,
            causal=True,
            window=kind.window,
            sinks=kind.sinks,
            max_tokens=self._options.max_tokens,
            ttl=self._options.ttl,
            reserve_tokens=self._options.reserve_tokens,
        )


class RemoteState:
    """What all layers of a cache share: the rows, and how far each layer is, here and on the server."""

    def __init__(self, client: Client, model_name: str, config: Any, num_layers: int, options: RemoteOptions) -> None:
        self.client = client
        self.sessions = Sessions(client, num_layers, options)
        self.model_name = model_name
        self._config = config
        self.closed = False
        self._num_layers = num_layers
        self._limits: tuple[int, int] | None = None
        self.reset()

    def check_usable(self) -> None:
        """Raises RuntimeError when the attention that comes next would not be attnd's, and so would miss the past."""
        if self.closed:
            raise RuntimeError("this RemoteCache is closed")
        implementation = self._config._attn_implementation
        if implementation != NAME:
            raise RuntimeError(
                f"{self.model_name} has its attention on {implementation!r} since its RemoteCache was made; "
                "make a new cache"
            )

    def reset(self) -> None:
        """Forgets everything, here and on the server."""
        self.sessions.close()
        self.slots = [0] * self._num_layers
        self.rows: Rows | None = None
        self._kinds: list[LayerKind | None] = [None] * self._num_layers
        # Per layer and row, how many tokens the server may have; more than the next step's start means a rewind.
        self._sent: list[list[int]] = [[] for _ in range(self._num_layers)]

    def crop(self, layer: int, remove: int) -> None:
        """Takes the last slots away. The server hears of it with the layer's next step."""
        self.slots[layer] = max(self.slots[layer] - remove, 0)

    def reorder(self, sources: list[int]) -> None:
        """Row i takes the tokens of row sources[i], in all layers and for all kinds of them.

        Raises:
            AttndError: the cache is closed, for its rows may be in another order on the server than here.
        """
        self.check_usable()
        if self.rows is None:
            return
        if len(sources) != self.rows.batch:
            raise ValueError(f"this cache holds {self.rows.batch} rows and {len(sources)} are to be reordered")
        try:
            self.sessions.reorder(sources)
        except AttndError as error:
            self.closed = True
            self.sessions.close()
            hint = "the rows of this cache are lost: make a new cache and run the whole prompt again"
            raise make_error(error.code, f"{error.message}; {hint}", error.reason, error.metadata) from error
        self.rows.reorder(sources)
        self._sent = [[sent[row] for row in sources] for sent in self._sent]

    def attend(
        self, layer: int, kind: LayerKind, plan: MaskPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """One layer's step for all rows.

        Args:
            q: [batch, num_q_heads, new, head_dim]; k and v: [batch, num_kv_heads, new, dim].

        Returns:
            [batch, new, num_q_heads, value_dim] in q's dtype and on its device; zeros where a slot is padding.

        Raises:
            AttndError: the cache is as it was before this forward pass, in all layers, and can go on from there unless
                the error says that the session is lost.
        """
        step = self._check(layer, kind, plan, q)
        try:
            out = self._send(layer, kind, step, q, k, v)
        except SessionLost as error:
            self._roll_back()
            hint = "the server lost a row of this cache: make a new cache and run the whole prompt again"
            raise make_error(error.code, f"{error.message}; {hint}", error.reason, error.metadata) from error
        except BaseException:
            self._roll_back()
            raise
        self.slots[layer] += q.shape[2]
        return out

    def _check(self, layer: int, kind: LayerKind, plan: MaskPlan, q: torch.Tensor) -> StepRows:
        batch, new, past = q.shape[0], q.shape[2], self.slots[layer]
        if self.rows is None:
            self.rows = Rows(batch)
            self._sent = [[0] * batch for _ in range(self._num_layers)]
        if self.rows.batch != batch:
            raise ValueError(f"this cache holds {self.rows.batch} rows and the batch has {batch}")
        if self._kinds[layer] not in (None, kind):
            raise ValueError(f"layer {layer} of {self.model_name} changed: {self._kinds[layer]} was, {kind} is")
        if (plan.q_offset, plan.q_length, plan.kv_length) != (past, new, past + new):
            raise NotImplementedError(
                f"{self.model_name} made a mask for {plan.q_length} queries at {plan.q_offset} of {plan.kv_length} "
                f"slots; layer {layer} has {new} at {past}"
            )
        plan.check_pattern(kind.window, self.model_name)
        step = self.rows.step(plan.padding, past, new, plan)
        if step.has_holes and kind.window is not None:
            raise NotImplementedError(
                f"{self.model_name} has a window, which counts padding, and a row has padding between its tokens"
            )
        self._kinds[layer] = kind
        return step

    def _send(
        self, layer: int, kind: LayerKind, step: StepRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        ids = self.sessions.of(kind, q.shape[0])
        real = None if step.real is None else torch.from_numpy(step.real).to(q.device)
        q_rows, k_rows, v_rows = (_rows_of(tensor, real) for tensor in (q, k, v))
        pieces = []
        for parts in _cut(step.parts, self._most_tokens(q_rows, k_rows, v_rows)):
            tokens = slice(parts[0].first, parts[-1].first + parts[-1].count)
            tensors = StepTensors(
                wire.encode("query", q_rows[tokens]),
                wire.encode("key", k_rows[tokens]),
                wire.encode("value", v_rows[tokens]),
            )
            pieces.append(self._send_parts(layer, ids, parts, tensors, kind))
        shape = (q.shape[0], q.shape[2], kind.num_q_heads, kind.value_dim)
        if not pieces:
            return q.new_zeros(shape)
        rows = torch.cat(pieces).to(q.device) if len(pieces) > 1 else pieces[0].to(q.device)
        if real is None:
            return rows.reshape(shape)
        out = q.new_zeros(shape)
        out[real] = rows
        return out

    def _most_tokens(self, *tensors: torch.Tensor) -> int:
        """Tokens that one step may have, by the server's limits and ours."""
        if self._limits is None:
            info = self.client.server_info()
            self._limits = (min(info.max_message_bytes // 2, STEP_BYTES), info.max_queue_tokens)
        most_bytes, most_tokens = self._limits
        token_bytes = sum(tensor.shape[1] * tensor.shape[2] * tensor.element_size() for tensor in tensors)
        return max(1, min(most_bytes // token_bytes, most_tokens))

    def _send_parts(
        self, layer: int, ids: list[str], parts: list[RowPart], tensors: StepTensors, kind: LayerKind
    ) -> torch.Tensor:
        sent = self._sent[layer]
        segments = [
            Segment(ids[part.row], part.count, part.start, rewind=sent[part.row] > part.start) for part in parts
        ]
        # Until an answer says otherwise the tokens may have arrived.
        for part in parts:
            sent[part.row] = max(sent[part.row], part.start + part.count)
        answer = self.client.send_step(step_request(layer, segments, tensors))
        failures = []
        for part, result in zip(parts, answer.segments, strict=True):
            error = segment_error(result)
            if error is not None:
                failures.append(error)
            else:
                sent[part.row] = part.start + part.count
        if failures:
            raise failures[0]
        return wire.decode(answer.out, (tensors.num_tokens, kind.num_q_heads, kind.value_dim))

    def _roll_back(self) -> None:
        """Forgets the forward pass that failed: layers before the failing one have its slots already."""
        start = min(self.slots)
        self.slots = [start] * self._num_layers


def _rows_of(tensor: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, new, dim] to [tokens, heads, dim], row after row, without the padding."""
    by_slot = tensor.transpose(1, 2)
    return by_slot.reshape(-1, *by_slot.shape[2:]) if real is None else by_slot[real]


def _cut(parts: tuple[RowPart, ...], most: int) -> list[list[RowPart]]:
    """Groups of at most ``most`` tokens, in order; a long part is cut."""
    groups: list[list[RowPart]] = []
    room = 0
    for part in parts:
        done = 0
        while done < part.count:
            if room == 0:
                groups.append([])
                room = most
            count = min(part.count - done, room)
            groups[-1].append(RowPart(part.row, part.start + done, count, part.first + done))
            done += count
            room -= count
    return groups
