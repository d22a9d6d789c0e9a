"""A batch's sessions, and the steps of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..client import Client
from ..errors import AttndError, SessionLost, TokensFreed, make_error
from ..steps import Segment, StepTensors, segment_error, step_request
from . import wire
from .masks import NAME, MaskPlan
from .rows import RowPart, Rows, StepRows
from .sessions import LayerKind, RemoteOptions, Sessions

# Most bytes of Q, K and V in one step; longer prompts go in several. Half of what both ends accept by default.
STEP_BYTES = 32 << 20

_START_AGAIN = "make a new cache and run the whole prompt again"


class RemoteState:
    """What all layers of a cache share: the rows, and how far each layer is, here and on the server.

    Args:
        config: of the model's decoder.
        windows: of each layer, as the configuration has it.
    """

    def __init__(
        self, client: Client, model_name: str, config: Any, windows: Sequence[int | None], options: RemoteOptions
    ) -> None:
        self.client = client
        self.sessions = Sessions(client, windows, options)
        self.model_name = model_name
        self._config = config
        self.closed = False
        self._num_layers = len(windows)
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
            raise _with_hint(error, "the rows of this cache are lost: " + _START_AGAIN) from error
        self._take_rows(sources)

    def select(self, indices: torch.Tensor) -> None:
        """The rows become rows indices[0], indices[1], ..., which may be more or fewer than before.

        Raises:
            AttndError: the rows are as before.
        """
        self.check_usable()
        if self.rows is None:
            return
        sources = torch.arange(self.rows.batch)[indices.to("cpu")].tolist()
        if not sources:
            raise ValueError("no row is selected; reset() empties a cache")
        self.sessions.select(sources)
        self._take_rows(sources)

    def repeat(self, repeats: int) -> None:
        """Every row ``repeats`` times, one copy after the other."""
        if self.rows is not None:
            self.select(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def _take_rows(self, sources: list[int]) -> None:
        assert self.rows is not None
        self.rows.select(sources)
        self._sent = [[sent[row] for row in sources] for sent in self._sent]

    def attend(
        self,
        layer: int,
        kind: LayerKind,
        plan: MaskPlan,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> torch.Tensor:
        """One layer's step for all rows.

        Args:
            q: [batch, num_q_heads, new, head_dim].
            k, v: [batch, num_kv_heads, new, dim]; None: another layer's queries, over K and V that came before.

        Returns:
            [batch, new, num_q_heads, value_dim] in q's dtype and on its device; zeros where a slot is padding.

        Raises:
            AttndError: the cache is as it was before this forward pass, in all layers, and can go on from there unless
                the error says that the session is lost, or that tokens are.
        """
        new = q.shape[2]
        past = self.slots[layer] - (new if k is None else 0)
        # A layer without K and V may ask for the last of the pass's slots only.
        pass_start = plan.pass_start if k is None else past
        try:
            step = self._check(layer, kind, plan, q, past)
            out = self._send(layer, kind, step, q, k, v)
        except SessionLost as error:
            self._roll_back(pass_start)
            raise _with_hint(error, "the server lost a row of this cache: " + _START_AGAIN) from error
        except TokensFreed as error:
            self._roll_back(pass_start)
            hint = "this cache was cropped to a place whose window is gone, or a prompt is too long for one step: "
            raise _with_hint(error, hint + "reset() it, and run the whole prompt again or in parts") from error
        except BaseException:
            self._roll_back(pass_start)
            raise
        self.slots[layer] = past + new
        return out

    def _check(self, layer: int, kind: LayerKind, plan: MaskPlan, q: torch.Tensor, past: int) -> StepRows:
        batch, new = q.shape[0], q.shape[2]
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
        self,
        layer: int,
        kind: LayerKind,
        step: StepRows,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> torch.Tensor:
        ids = self.sessions.of(layer, kind, q.shape[0])
        real = None if step.real is None else torch.from_numpy(step.real).to(q.device)
        named = {name: t for name, t in (("query", q), ("key", k), ("value", v)) if t is not None}
        rows = {name: _rows_of(tensor, real) for name, tensor in named.items()}
        pieces = []
        for parts in _cut(step.parts, self._most_tokens(*rows.values())):
            tokens = slice(parts[0].first, parts[-1].first + parts[-1].count)
            encoded = {name: wire.encode(name, tensor[tokens]) for name, tensor in rows.items()}
            tensors = StepTensors(encoded["query"], encoded.get("key"), encoded.get("value"))
            pieces.append(self._send_parts(layer, ids, parts, tensors, kind))
        shape = (q.shape[0], q.shape[2], kind.session.num_q_heads, kind.session.value_dim)
        if not pieces:
            return q.new_zeros(shape)
        answers = torch.cat(pieces).to(q.device) if len(pieces) > 1 else pieces[0].to(q.device)
        if real is None:
            return answers.reshape(shape)
        out = q.new_zeros(shape)
        out[real] = answers
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
        # What queries alone ask changes nothing on the server.
        sent = self._sent[layer] if tensors.k is not None else [0] * len(ids)
        segments = [
            Segment(ids[part.row], part.count, part.start, rewind=sent[part.row] > part.start) for part in parts
        ]
        # Until an answer says otherwise the tokens may have arrived.
        for part in parts:
            sent[part.row] = max(sent[part.row], part.start + part.count)
        request = step_request(layer, segments, tensors, return_lse=kind.sinks is not None)
        answer = self.client.send_step(request)
        failures = []
        for part, result in zip(parts, answer.segments, strict=True):
            error = segment_error(result)
            if error is not None:
                failures.append(error)
            else:
                sent[part.row] = part.start + part.count
        if failures:
            raise failures[0]
        heads = kind.session.num_q_heads
        out = wire.decode(answer.out, (tensors.num_tokens, heads, kind.session.value_dim))
        if kind.sinks is None:
            return out
        return _with_sinks(out, wire.decode(answer.lse, (tensors.num_tokens, heads)), kind.sinks)

    def _roll_back(self, start: int) -> None:
        """Forgets the forward pass that failed: layers before the failing one have its slots already."""
        self.slots = [min(slots, start) for slots in self.slots]


def _with_hint(error: AttndError, hint: str) -> AttndError:
    return make_error(error.code, f"{error.message}; {hint}", error.reason, error.metadata)


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: tuple[float, ...]) -> torch.Tensor:
    """Attention as if exp(sink) had joined each row's denominator: exp(lse) / (exp(lse) + exp(sink)) of it.

    A session has one set of sinks for all of its layers, and models have one for each. Here, layers share a session.

    Args:
        out: [tokens, num_q_heads, value_dim], without sinks.
        lse: float32 [tokens, num_q_heads].
    """
    weights = torch.sigmoid(lse - torch.tensor(sinks, dtype=torch.float32))
    return (out.float() * weights[..., None]).to(out.dtype)


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
