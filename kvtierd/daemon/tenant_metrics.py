"""What each tenant has and does, as Prometheus sees it. Its label takes the names of the configuration, 64 at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvtierd.config.schema import Tenant
from kvtierd.daemon.census import Census
from kvtierd.daemon.requests import Tokens
from kvtierd.protocol.messages import Tier
from kvtierd.telemetry.prometheus import Family, Labels, Value
from kvtierd.tiers.namespaces import NamespaceEntry
from kvtierd.tiers.quotas import Quotas

BLOCKS = Family("tenant_blocks", "gauge", "blocks", "blocks of a tenant with a copy in a tier; one can be in several")
USED = Family(
    "tenant_used_bytes", "gauge", "bytes",
    "what a tenant has in a tier: slots in gpu and host, and in nvme its blocks at the size that they have in memory",
)  # fmt: skip
QUOTA = Family("tenant_quota_bytes", "gauge", "bytes", "what it may have there, where it has a quota")
SESSIONS = Family("tenant_sessions", "gauge", "", "clients of a tenant now")
ASKED = Family("tenant_lookup_tokens_total", "counter", "tokens", "tokens of the blocks that its lookups asked for")
FOUND = Family("tenant_hit_tokens_total", "counter", "tokens", "of these, tokens found, by the fastest tier")
LEASES = Family("tenant_leases", "gauge", "", "read leases, write reservations and open sequences of a tenant")
HELD = Family(
    "tenant_held_bytes", "gauge", "bytes",
    "host slots in these, each once; leases.tenant_share bounds it, and it is there where there are several tenants",
)  # fmt: skip
REFUSALS = Family(
    "tenant_quota_refusals_total", "counter", "", "how often a quota of a tenant refused something, or cut it short"
)

LABELS: Mapping[Family, tuple[str, ...]] = {
    BLOCKS: ("tenant", "tier"),
    USED: ("tenant", "tier"),
    QUOTA: ("tenant", "tier"),
    SESSIONS: ("tenant",),
    ASKED: ("tenant",),
    FOUND: ("tenant", "tier"),
    LEASES: ("tenant", "kind"),
    HELD: ("tenant",),
    REFUSALS: ("tenant", "quota"),
}
"""Every family with its labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class TenantNumbers:
    """What one tenant has and does: blocks, bytes and quotas by tier, leases by kind, refusals by quota."""

    name: str
    blocks: Mapping[Tier, int]
    used_bytes: Mapping[Tier, int]
    quota_bytes: Mapping[Tier, int]
    sessions: int
    tokens: Tokens
    leases: Mapping[str, int]
    held_bytes: int | None
    refusals: Mapping[str, int]


def numbers_of(
    name: str,
    terms: Tenant,
    entries: Sequence[NamespaceEntry],
    census: Census,
    quotas: Quotas,
    sessions: int,
    tokens: Tokens,
) -> TenantNumbers:
    """Put together what a tenant has and does; `entries` are its namespaces."""
    numbers = np.array([entry.number for entry in entries], np.intp)
    slot_bytes = np.array([entry.geometry.slot_bytes for entry in entries], np.int64)
    used = quotas.used(name)
    nvme_bytes = int((census.by_tier["nvme"][numbers] * slot_bytes).sum())
    return TenantNumbers(
        name=name,
        blocks={tier: int(counts[numbers].sum()) for tier, counts in census.by_tier.items()},
        used_bytes={"gpu": used.get("gpu_used_bytes", 0), "host": used.get("host_used_bytes", 0), "nvme": nvme_bytes},
        quota_bytes={"gpu": terms.gpu_bytes, "host": terms.host_bytes, "nvme": terms.nvme_bytes},
        sessions=sessions,
        tokens=tokens,
        leases=quotas.leases_of(name),
        held_bytes=quotas.held_bytes(name),
        refusals=quotas.refusals(name),
    )


Samples = list[tuple[Labels, Value]]


def collect_tenants(tenants: list[TenantNumbers]) -> Iterator[tuple[Family, Samples]]:
    """Families with the samples of all tenants."""
    found: dict[Family, Samples] = {family: [] for family in LABELS}
    for tenant in tenants:
        for family, by in (
            (BLOCKS, tenant.blocks),
            (USED, tenant.used_bytes),
            (QUOTA, {tier: size for tier, size in tenant.quota_bytes.items() if size}),
            (FOUND, {tier: tenant.tokens.hits(tier) for tier in tenant.blocks}),
            (LEASES, tenant.leases),
            (REFUSALS, tenant.refusals),
        ):
            label = LABELS[family][1]
            found[family] += [({"tenant": tenant.name, label: name}, count) for name, count in by.items()]
        own = {"tenant": tenant.name}
        found[SESSIONS].append((own, tenant.sessions))
        found[ASKED].append((own, tenant.tokens.asked))
        if tenant.held_bytes is not None:
            found[HELD].append((own, tenant.held_bytes))
    yield from found.items()
