"""What an asynchronous client does with parts of blocks (see kvtierd.protocol.aio)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.keys import Keys
from kvtierd.protocol.aio_driver import AsyncDriver
from kvtierd.protocol.messages import AnyRequest, Reshape
from kvtierd.protocol.part_lease import Part, fetch_part
from kvtierd.protocol.queries import Queries
from kvtierd.protocol.results import NamespaceHandle
from kvtierd.protocol.slots import SlotPlans


class AsyncParts:
    """Part of AsyncClient, which has these."""

    _driver: AsyncDriver
    _queries: Queries
    _slots: SlotPlans

    def _transfer_ns(self, timeout_s: float | None) -> int:
        raise NotImplementedError

    async def fetch_part(
        self,
        namespace: NamespaceHandle,
        keys: Keys,
        begin: int,
        end: int,
        *,
        verify: bool = True,
        timeout_s: float | None = None,
    ) -> Part:
        """As `Client.fetch_part`."""
        plan = fetch_part(
            self._slots, namespace, keys, begin, end, verify=verify, deadline_ns=self._transfer_ns(timeout_s)
        )
        return await self._driver.run(plan)

    async def reshape(
        self, namespace: NamespaceHandle, keys: Keys, parts: Sequence[int], *, timeout_s: float | None = None
    ) -> int:
        """As `Client.reshape`."""
        deadline_ns = self._transfer_ns(timeout_s)

        def build(number: int) -> AnyRequest:
            return Reshape(id=0, namespace=number, parts=list(parts))

        return await self._driver.run(self._queries.count(namespace, build, keys, deadline_ns))
