"""The request of `moectl serve`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadUsage
from artifacts.quantisation.replicas import check_base
from moectl.serving.guard import LOOPBACK, ServerLimits, host_name
from runtime.session.settings import Settings

RAY = "ray"


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Settings of a server, and the clients that it lets in.

    `replicas` is the number of servers on Ray, at `executor`; None serves from this process. Raises
    BadUsage for a width that no replica has, and for a server that anybody could reach without a
    key.
    """

    settings: Settings
    limits: ServerLimits
    host: str
    port: int
    api_key: str | None
    store: Path
    base: int
    replicas: int | None = None
    executor: str = RAY

    def __post_init__(self) -> None:
        check_base(self.base)
        if not self.hosts and not self.api_key:
            raise BadUsage(
                f"--host {self.host} lets anybody in: give --api-key, or leave it out to serve "
                "this machine alone"
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names by which local programs call a server that only they can reach, none if others
        can."""
        return LOOPBACK if host_name(self.shown_host) in LOOPBACK else ()

    @property
    def shown_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host
