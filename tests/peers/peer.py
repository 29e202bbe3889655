"""What is known of a peer before it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from lightning_indexer.testing.contracts import KernelContract


@dataclass(frozen=True)
class Probe:
    """A promise that this package makes and the peer does not: does it hold nevertheless?

    Attributes:
        promise: in words.
        contract: the peer's own, with that promise added.
        about: words of the names of the properties to try; () for all.
    """

    promise: str
    contract: KernelContract
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peer:
    """A foreign function, and what its documentation promises.

    Attributes:
        name: as its users call it.
        package: the distribution that has it; its version is reported.
        source: the file in the package, or the page, that the promises are read from.
        promises: in words, as said there.
        op: a suite of the kit.
        load: imports the package and returns the function under the kit's signature.
        contract: the promises as the kit has them; what is not promised is left out.
        probes: promises that were left out.
        triton: whether its Triton code runs, in Triton's interpreter.
    """

    name: str
    package: str
    source: str
    promises: str
    op: str
    load: Callable[[], Callable[..., Any]]
    contract: KernelContract
    probes: tuple[Probe, ...] = field(default=())
    triton: bool = False

    @property
    def version(self) -> str | None:
        """Of the installed package; None if there is none."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None
