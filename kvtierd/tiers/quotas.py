"""Quotas of tenants: bytes in each tier, requests and blocks under way. Where no tenant has any, nothing is asked here.

Bytes of host and gpu are slabs (slab_quota), which a class of slots asks for when it grows; bytes of nvme are counted
(disk_quota). A request that goes on in the background counts while it is worked on, and a block while it is on its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvtierd.config.schema import Settings, Tenant
from kvtierd.protocol.messages import StatsReply, Tier
from kvtierd.protocol.service import Answer, Session
from kvtierd.tiers.copies import Copies
from kvtierd.tiers.disk_quota import DiskQuota, Forget
from kvtierd.tiers.lease_quota import LeaseQuota
from kvtierd.tiers.leases import Lease, Register, Reservation
from kvtierd.tiers.namespaces import MAX_NAMESPACES
from kvtierd.tiers.room import Room
from kvtierd.tiers.sequences import OpenedSequence
from kvtierd.tiers.slab_quota import SlabQuota
from kvtierd.tiers.write_behind import WriteBehind


@dataclasses.dataclass(slots=True, eq=False)
class RequestQuota:
    """Requests of one tenant being worked on (protocol.service.Session.quota); `limit` 0 is none."""

    limit: int = 0
    count: int = 0
    refused: int = 0

    @property
    def full(self) -> bool:
        """Whether no more may be taken up now."""
        return 0 < self.limit <= self.count


class Quotas:
    """All quotas of a daemon. Everything runs on the loop."""

    def __init__(
        self,
        settings: Settings,
        copies: Copies,
        room: Room,
        write_behind: WriteBehind | None,
        forget: Forget,
        held: tuple[Register[Lease], Register[Reservation], Register[OpenedSequence]],
    ) -> None:
        self._registers: dict[str, Register[Any]] = dict(zip(("read", "write", "sequence"), held, strict=True))
        self._copies = copies
        self._room = room
        self._write_behind = write_behind
        self._forget = forget
        self._requests: dict[str, RequestQuota] = {}
        self._disk: DiskQuota | None = None
        self._several = False
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take over quotas. What a tenant has over a lowered one is taken from it in the steps that follow."""
        tenants = settings.tenants
        count = len({settings.server.tenant, *tenants})
        self._several = count > 1
        self._copies.namespaces.tenant_max = MAX_NAMESPACES // count
        self._set_slabs(tenants)
        self._set_leases(settings)
        self._set_disk({name: terms.nvme_bytes for name, terms in tenants.items() if terms.nvme_bytes})
        limits: dict[tuple[str, Tier], int] = {}
        for name, terms in tenants.items():
            limits |= {(name, "gpu"): terms.gpu_inflight, (name, "nvme"): terms.nvme_inflight}
        self._copies.under_way.limits = {key: limit for key, limit in limits.items() if limit}
        for name, terms in tenants.items():
            self._requests.setdefault(name, RequestQuota()).limit = terms.host_inflight

    def requests_of(self, tenant: str) -> RequestQuota | None:
        """The quota of a tenant's requests; None for one that the configuration does not name."""
        return self._requests.get(tenant)

    def step(self) -> None:
        """Take from tenants what they have over their quotas, piece by piece; call it every so often."""
        if self._disk is not None:
            self._disk.step()
        host, gpu = self._copies.host, self._copies.gpu
        if host.quota is not None and (cls := host.quota.to_give()) is not None:
            self._room.shed_slab(cls)
        if gpu is not None and gpu.quota is not None and (cls := gpu.quota.to_give()) is not None:
            self._room.shed_gpu_slab(cls)

    def stats(self, session: Session, everything: Callable[[], dict[str, Any]]) -> Answer:
        """Serve statistics: `everything`, or where there are other tenants what is the client's own's."""
        return Answer(StatsReply(id=0, stats=self.used(session.tenant) if self._several else everything()))

    def described(self, tenant: str, terms: Tenant) -> dict[str, Any]:
        """What a tenant has of what it may have, for operators."""
        requests = self._requests.get(tenant)
        limits = {f"{tier}_limit_bytes": getattr(terms, f"{tier}_bytes") for tier in ("gpu", "host", "nvme")}
        under_way = {"requests": requests.count if requests else 0, "requests_limit": terms.host_inflight}
        return {"nvme_used_bytes": 0, **self.used(tenant), **limits, **under_way, "keys": len(terms.keys.split())}

    def leases_of(self, tenant: str) -> dict[str, int]:
        """How many leases, reservations and sequences a tenant has, by kind."""
        return {kind: register.count_of(tenant) for kind, register in self._registers.items()}

    def held_bytes(self, tenant: str) -> int | None:
        """Bytes of host slots in these; None where the tenant is alone, and nobody counts them."""
        leased = self._copies.host.leased
        return None if leased is None else leased.held_bytes(tenant)

    def refusals(self, tenant: str) -> dict[str, int]:
        """How often each quota refused something of a tenant, or cut it short."""
        leased, requests = self._copies.host.leased, self._requests.get(tenant)
        under_way = self._copies.under_way.refused
        return {
            "host_inflight": requests.refused if requests is not None else 0,
            "gpu_inflight": under_way[tenant, "gpu"],
            "nvme_inflight": under_way[tenant, "nvme"],
            "nvme_bytes": self._disk.refused[tenant] if self._disk is not None else 0,
            "tenant_share": (leased.refused[tenant] if leased is not None else 0)
            + sum(register.refused[tenant] for register in self._registers.values()),
        }

    def used(self, tenant: str) -> dict[str, Any]:
        """What a tenant has."""
        found: dict[str, Any] = {"namespaces": self._copies.namespaces.count_of(tenant)}
        for name, tier in (("host", self._copies.host), ("gpu", self._copies.gpu)):
            classes = [cls for cls in tier.pool.classes if cls.tenant == tenant] if tier is not None else []
            found[f"{name}_used_bytes"] = sum(cls.used * cls.slot_bytes for cls in classes)
        if self._disk is not None:
            found["nvme_used_bytes"] = self._disk.used_bytes(tenant)
        return found

    def _set_slabs(self, tenants: Mapping[str, Tenant]) -> None:
        for tier, leaf in ((self._copies.host, "host_bytes"), (self._copies.gpu, "gpu_bytes")):
            limits = {name: getattr(terms, leaf) for name, terms in tenants.items()}
            if tier is None or (tier.quota is None and not any(limits.values())):
                continue
            if tier.quota is None:
                tier.quota = SlabQuota(tier.pool, limits)
            else:
                tier.quota.set(limits)

    def _set_leases(self, settings: Settings) -> None:
        host, share = self._copies.host, settings.leases.tenant_share if self._several else 1
        limit_bytes = int(settings.host.capacity * share)
        for register in self._registers.values():
            register.tenant_limit = max(1, int(register.limit * share))
        if host.leased is not None:
            host.leased.limit_bytes = limit_bytes
        elif self._several:
            host.leased = LeaseQuota(host.pool.slots_max, limit_bytes)

    def _set_disk(self, limits: Mapping[str, int]) -> None:
        if self._write_behind is None or (self._disk is None and not limits):
            return
        if self._disk is not None:
            self._disk.set(limits)
            return
        self._disk = DiskQuota(self._copies, self._forget, limits)
        self._copies.blocks.disk_quota = self._write_behind.quota = self._disk
