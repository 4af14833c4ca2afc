"""torchft's lighthouse, where workers meet: the one place that imports torchft.

Of torchft this needs the lighthouse alone: ``quorum`` brings those together that call, and ``heartbeat`` tells it for
whom to wait. Managers, which serve the ranks of a larger replica, and checkpoints, which unpickle, are not used.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from prsgd.comm.quorum import Caller
from prsgd.errors import MismatchError, PeerError, UsageError

KNOWN = "torchft-nightly>=2026.10.26"
"""What works."""
_UNKNOWN = f"TorchFT knows: it works with {KNOWN}"
BEAT_SECONDS = 0.1
"""Between two heartbeats."""
SILENT_BEATS = 3
"""Heartbeats in a row, of a second each, that a lighthouse may leave unanswered before it is taken to be gone."""
ASK_SECONDS = 5.0
"""After which a worker asks again, whoever it waits for."""
CONNECT_SECONDS = 10.0


class Lighthouse:
    """This process's way to the lighthouse at ``address``, and its heartbeats while ``is_well()``."""

    def __init__(self, address: str, replica: str, is_well: Callable[[], bool]) -> None:
        self.address, self._replica, self._is_well = address, replica, is_well
        client = _client_class()
        try:
            self._client = client(address, timedelta(seconds=CONNECT_SECONDS))
        except (RuntimeError, TimeoutError):
            raise PeerError(f"no lighthouse answers at {address} ({_HOW})") from None
        self._unanswered = 0
        """Heartbeats in a row."""
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True, name="prsgd-heartbeat")
        self._beats.start()

    def ask(self, caller: Caller) -> tuple[str, list[Caller]] | None:
        """Whoever calls now, once all are there for whom the lighthouse waits, and a name for it; None: ask again.

        An OSError: there is no lighthouse, or none that answers.
        """
        began = time.monotonic()
        self._require_answers()
        try:
            found = self._client.quorum(
                replica_id=self._replica, timeout=timedelta(seconds=ASK_SECONDS), data=caller.told()
            )
        except TimeoutError:
            self._require_answers()
            return None
        except RuntimeError as error:
            if time.monotonic() - began > ASK_SECONDS - 1:
                self._require_answers()
                return None
            message = re.search(r'message: "(.*?)"', str(error))
            raise OSError(message[1] if message else str(error)) from None
        name = f"{found.quorum_id}.{found.created.seconds}.{found.created.nanos}"
        try:
            return name, [Caller.of(member.data) for member in found.participants]
        except (KeyError, TypeError):
            raise MismatchError(
                f"others than workers of this library meet at the lighthouse {self.address}: each run needs its own"
            ) from None

    def _require_answers(self) -> None:
        if self._unanswered >= SILENT_BEATS:
            raise OSError("it does not answer")

    def close(self) -> None:
        """No more heartbeats: the others need not wait."""
        self._closed.set()
        if threading.current_thread() is not self._beats:
            self._beats.join(2.0)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            if self._is_well():
                try:
                    self._client.heartbeat(self._replica, timedelta(seconds=1))
                    self._unanswered = 0
                except (RuntimeError, TimeoutError):
                    self._unanswered += 1  # whoever asks finds out


_HOW = "start one: torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --heartbeat_timeout_ms 500"


def serve(host: str, port: int = 0) -> tuple[str, Any]:
    """A lighthouse in this process, as workers want it: its address, and what has a ``shutdown``; port 0: a free one.

    Who is silent for half a second is no longer waited for.
    """
    torchft = _torchft()
    try:
        server = torchft.LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=1,
            join_timeout_ms=60_000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=500,
        )
    except RuntimeError as error:
        raise UsageError(f"no lighthouse can listen at {host}:{port} ({error})") from None
    except (AttributeError, TypeError):
        raise UsageError(f"this torchft's LighthouseServer is none that {_UNKNOWN}") from None
    return f"{host}:{server.address().rpartition(':')[2]}", server


def _torchft() -> Any:
    """torchft's coordination, or one line that says what is missing."""
    os.environ.setdefault("RUST_LOG", "warn")  # it tells every quorum on stderr otherwise; read when it is imported
    try:
        from torchft import coordination
    except ImportError as error:
        raise UsageError(f"TorchFT needs torchft ({error}): pip install 'prsgd[elastic]', which is {KNOWN}") from None
    return coordination


def _client_class() -> Any:
    client: Any = getattr(_torchft(), "LighthouseClient", None)
    needed = {"replica_id", "timeout", "data"}
    try:
        offered = set(inspect.signature(client.quorum).parameters)
    except (AttributeError, TypeError, ValueError):
        offered = set()
    if not needed <= offered or not callable(getattr(client, "heartbeat", None)):
        raise UsageError(f"this torchft's LighthouseClient is none that {_UNKNOWN}")
    return client
