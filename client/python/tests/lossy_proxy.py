"""A TCP proxy that can lose an answer: the server has done the work, and the client never hears of it."""

from __future__ import annotations

import contextlib
import socket
import threading


class LossyProxy:
    """Attributes:
    target: "host:port" to connect to.
    lost: how many connections it has cut.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.lost = 0
        self._armed_for = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer_of(self, size: int) -> None:
        """Cuts the connection once ``size`` bytes of answers have come from the server, and delivers none of them."""
        self._armed_for = size

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                for source, sink, answers in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._copy, args=(source, sink, answers), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        held = 0
        holding = False
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and self._armed_for:
                    held += len(data)
                    if held >= self._armed_for:
                        self._armed_for = 0
                        self.lost += 1
                        break
                    # Small frames of the protocol itself go on until the answer begins.
                    holding = holding or len(data) > 1024
                    if holding:
                        continue
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
