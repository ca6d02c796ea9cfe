"""Exchange of values between ranks through the store of the rendezvous, without a process group."""

import dataclasses
import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tutti.errors import LaunchError
from tutti.ranks.secret import ForgedContent, Secret
from tutti.runs.files import to_dataclass

Kind = TypeVar("Kind")


class StoreExchange:
    """Values by key, signed; a value that does not arrive in time is None."""

    def __init__(self, store: dist.Store, rank: int, secret: Secret) -> None:
        self._store = store
        self.rank = rank
        self._secret = secret

    def put(self, key: str, value: Any) -> None:
        """Set a value: plain values, or dataclasses of them."""
        try:
            signed = self._secret.sign(json.dumps(value, default=dataclasses.asdict).encode(), f"doctor {key}")
            self._store.set(key, signed)  # pyright: ignore[reportArgumentType]
        except dist.DistError as error:
            raise _gone(error) from error

    def take(self, key: str, seconds: float) -> Any:
        """Wait for the value of a key."""
        return self.collect([key], seconds).get(key)

    def collect(self, keys: Iterable[str], seconds: float) -> dict[str, Any]:
        """Wait for the values of keys; those that do not arrive in time are left out."""
        wanted = list(keys)
        try:
            try:
                self._store.wait(wanted, timedelta(seconds=seconds))
            except dist.DistStoreError:
                wanted = [key for key in wanted if self._store.check([key])]
            return {key: json.loads(self._secret.verify(self._store.get(key), f"doctor {key}")) for key in wanted}
        except ForgedContent as error:
            raise LaunchError(f"a stranger writes into the store of this job: {error}. Start it again.") from error
        except dist.DistError as error:
            raise _gone(error) from error

    def put_any(self, key: str, value: Any, count: int) -> None:
        """Set a value that any of `count` ranks may have; if none of them has one, the last call sets None."""
        if value is not None:
            self.put(key, value)
        try:
            if self._store.add(f"{key}/calls", 1) == count and not self._store.check([key]):
                self.put(key, None)
        except dist.DistError as error:
            raise _gone(error) from error

    def meet(self, key: str, count: int, seconds: float) -> bool:
        """A barrier of `count` ranks; returns whether all have called it in time."""
        try:
            if self._store.add(f"{key}/count", 1) == count:
                self._store.set(f"{key}/open", "")
            self._store.wait([f"{key}/open"], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        except dist.DistError as error:
            raise _gone(error) from error
        return True


def decode(value: Any, kind: type[Kind], sender: str) -> Kind:
    """What another rank or host has sent, validated; keys that a newer version adds are left out."""
    try:
        return to_dataclass(value, kind, extra="ignore")
    except ValueError as error:
        raise LaunchError(
            f"{sender} sent values that this version of tutti cannot read ({error}). "
            "Install the same version on all hosts."
        ) from error


def _gone(error: Exception) -> LaunchError:
    return LaunchError(
        f"rank 0, which holds the store of the rendezvous, has ended ({str(error).splitlines()[0]}). See its output."
    )
