"""The request of `moectl serve`. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import BadUsage
from artifacts.quantisation.replicas import check_base
from moectl.serving.guard import ANY_ORIGIN, LOOPBACK, ServerLimits, host_name
from runtime.session.settings import Settings

RAY = "ray"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@A-Z]+")  # as browsers send it


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Settings of a server, and the clients that it lets in.

    Clients use the first of `served_model_name`, or another of them; the model's own without one.
    Web pages of `cors_origin` may ask. With `strict` unknown options are refused. `replicas` is the
    number of servers on Ray, at `executor`; None serves from this process. Raises BadUsage for a
    width that no replica has, for what is no origin, and for a server that anybody could reach
    without a key.
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
    served_model_name: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    strict: bool = False

    def __post_init__(self) -> None:
        check_base(self.base)
        for origin in self.cors_origin:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise BadUsage(
                    f"--cors-origin {origin} is no origin: give it as http://localhost:3000, in "
                    "lower case and without a path, or * for any page"
                )
        if not all(self.served_model_name):
            raise BadUsage("--served-model-name is empty: give the name that clients use")
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
