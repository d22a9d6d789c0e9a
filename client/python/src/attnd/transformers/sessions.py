"""The sessions of a cache: which of them a layer's rows are in, and moving rows between them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..client import Client
from ..config import SessionConfig
from ..errors import AttndError, SessionLost

# Closing happens also while the interpreter ends or a server is gone: it must not take long.
CLOSE_TIMEOUT = 2.0


@dataclass(frozen=True)
class SessionKind:
    """What a session fixes at its creation for all of its layers."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class LayerKind:
    """What a layer asks of its attention, the same in every forward pass."""

    session: SessionKind
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
    """One session per row, for all layers whose heads and dims are the same. Owned by the process that made them.

    A session knows each layer's window from the model's configuration. A layer that turns out to have another one gets
    sessions of its own kind. Layers that a session has and never uses cost it nothing, unless tokens are reserved.
    """

    def __init__(self, client: Client, windows: Sequence[int | None], options: RemoteOptions) -> None:
        self._client = client
        self._windows = tuple(windows)
        self._options = options
        self._pid = os.getpid()
        # By kind and the windows of all layers.
        self._groups: dict[tuple[SessionKind, tuple[int | None, ...]], list[str]] = {}

    def of(self, layer: int, kind: LayerKind, batch: int) -> list[str]:
        """The session ids of a layer's rows, created at first use."""
        expected = self._windows[layer] == kind.window
        windows = self._windows if expected else (kind.window,) * len(self._windows)
        key = (kind.session, windows)
        if key not in self._groups:
            config = self._config(kind.session, windows)
            ids: list[str] = []
            with self._closing_on_error(ids):
                for _ in range(batch):
                    ids.append(self._client.create_session(config).session_id)
            self._groups[key] = ids
        return self._groups[key]

    def ids(self) -> list[str]:
        return [session_id for ids in self._groups.values() for session_id in ids]

    def reorder(self, sources: list[int]) -> None:
        """Row i takes the tokens of row sources[i]; as many rows as before."""
        for ids in self._groups.values():
            self._client.reorder(ids, sources)

    def select(self, sources: list[int]) -> None:
        """The rows become rows sources[0], sources[1], ...: those named twice are forked, those not named closed.

        After an error they are as before.
        """
        selected = {}
        forks: list[str] = []
        with self._closing_on_error(forks):
            for key, ids in self._groups.items():
                taken: set[int] = set()
                rows = []
                for source in sources:
                    if source in taken:
                        forks.append(self._client.fork(ids[source]).session_id)
                    rows.append(forks[-1] if source in taken else ids[source])
                    taken.add(source)
                selected[key] = rows
        gone = set(self.ids())
        self._groups = selected
        self._close_all(sorted(gone - set(self.ids())))

    def close(self) -> None:
        """Frees them on the server. A server that does not answer keeps them until their time to live ends."""
        ids = self.ids() if self._pid == os.getpid() else []
        self._groups.clear()
        self._close_all(ids)

    @contextlib.contextmanager
    def _closing_on_error(self, ids: list[str]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close_all(ids)
            raise

    def _close_all(self, ids: Sequence[str]) -> None:
        for session_id in ids:
            try:
                with contextlib.suppress(SessionLost):
                    self._client.close_session(session_id, timeout=CLOSE_TIMEOUT)
            except AttndError:
                return

    def _config(self, kind: SessionKind, windows: tuple[int | None, ...]) -> SessionConfig:
        return SessionConfig(
            num_layers=len(windows),
            num_q_heads=kind.num_q_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            value_dim=kind.value_dim,
            kv_dtype=self._options.kv_dtype,
            scale=kind.scale,
            softcap=kind.softcap,
            causal=True,
            layer_windows=windows if any(windows) else None,
            max_tokens=self._options.max_tokens,
            ttl=self._options.ttl,
            reserve_tokens=self._options.reserve_tokens,
        )
