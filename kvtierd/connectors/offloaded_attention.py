"""`attn_implementation="kvtierd"`: attention of transformers models whose past an OffloadedCache keeps in the daemon.

The cache hands out what is in this process only, as a tensor that names its layer. Attention over that is computed
here, attention over the past by the daemon, and the two are merged by log-sum-exp. With any other cache, or none, it is
torch's own attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

NAME = "kvtierd"

ATTRIBUTE = "_kvtierd_layer"
"""Of a key tensor that a layer of an OffloadedCache handed out: that layer."""

_UNDERSTOOD = frozenset({"position_ids", "cache_position", "use_cache", "logits_to_keep", "num_items_in_batch"})
"""Keyword arguments that shape no attention."""

QUERIES = 512
"""Of queries over keys in this process, so many at a time: their scores lie in memory."""


GO_ON = (
    "to go on from a cache that holds tokens pass the whole conversation, longer than the cache, without "
    "prefill_chunk_size or assisted decoding, which transformers begins at token 0"
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """What a forward pass says of padding and places, for all layers.

    Query i stands in column `q_offset` + i. `padding` is the 2D mask of the caller ([rows, columns], True for tokens),
    None where it named none. `pads` is how many padded columns each row begins with, None for no padding.
    """

    q_offset: int
    q_length: int
    padding: torch.Tensor | None
    pads: torch.Tensor | None


class OffloadedKeys(Protocol):
    """What attention wants of the layer that handed out a key tensor."""

    def attend(self, query: Any, key: Any, value: Any, mask: Mask, scale: float, positions: Any) -> torch.Tensor:
        """Attention over the past and over these keys: [rows, queries, heads, v_dim]. `positions` as the model has
        them, [rows or 1, queries], or None."""
        ...


def register_offloaded_attention() -> None:
    """Make `attn_implementation="kvtierd"` known to transformers; a second call does nothing new."""
    AttentionInterface.register(NAME, offloaded_attention)
    AttentionMaskInterface.register(NAME, offloaded_mask)


def offloaded_mask(
    *,
    q_length: int,
    q_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_options: Any,
) -> Mask:
    """What transformers makes once a forward pass and hands to every layer.

    Raises ValueError for what is not causal attention with padding on the left: windows, chunks, packed sequences.
    """
    if mask_function is not causal_mask_function:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise ValueError(
            f"attn_implementation={NAME!r} is causal attention over all that came before, and this model asks for the "
            f"mask {name} (a sliding window, chunks, packed sequences or the like): load it with another one"
        )
    end = int(q_offset) + q_length
    if attention_mask is not None:
        if attention_mask.shape[1] != end:
            raise ValueError(
                f"attention_mask covers {attention_mask.shape[1]} tokens, and with the {int(q_offset)} in the cache "
                f"there are {end}: {GO_ON}"
            )
        if bool(attention_mask.all()):
            return Mask(int(q_offset), q_length, attention_mask, None)
        return Mask(int(q_offset), q_length, attention_mask, _left_padding(attention_mask))
    return Mask(int(q_offset), q_length, None, None)


def offloaded_attention(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [rows, heads, queries, k_dim], key, value [rows, kv_heads, keys, dim].

    Answers [rows, queries, heads, v_dim] and no weights. Raises ValueError for options that shape attention in ways it
    does not have, OffloadError where the past cannot be reached.
    """
    _check_options(dropout, options)
    if not isinstance(attention_mask, Mask):
        what = f"a tensor of shape {tuple(attention_mask.shape)}" if attention_mask is not None else "None"
        raise ValueError(
            f"attention_mask is {what}; attn_implementation={NAME!r} wants it as [rows, tokens], or not at all"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer: OffloadedKeys | None = getattr(key, ATTRIBUTE, None)
    if layer is not None:
        return layer.attend(query, key, value, attention_mask, scale, options.get("position_ids")), None
    first = attention_mask.q_offset + attention_mask.q_length - key.shape[2]
    begins = attention_mask.pads
    return plain_attention(query, key, value, scale, first, attention_mask.q_offset, begins), None


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    first: int,
    q_offset: int,
    begins: torch.Tensor | None,
) -> torch.Tensor:
    """torch's attention over keys in columns from `first` on, of which row r sees those from `begins[r]` on."""
    count = query.shape[2]
    bare = begins is None or bool((begins <= first).all())
    if causal := bare and q_offset == first and key.shape[2] == count:
        allowed = None
    else:
        allowed = visible(first, key.shape[2], q_offset, count, begins, key.device)
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        is_causal=causal and count > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous()


def attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, allowed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float32, and its log-sum-exp: [rows, queries, heads, v_dim] and [rows, queries, heads].

    `allowed` is [rows or 1, 1, queries, keys], None for all. Queries that see no key get 0 and -Inf.
    """
    rows, heads, count, _ = query.shape
    kv_heads, dim = key.shape[1], value.shape[-1]
    k, v = key.float().transpose(2, 3), value.float()
    output = torch.empty((rows, count, heads, dim), dtype=torch.float32, device=query.device)
    lse = torch.empty((rows, count, heads), dtype=torch.float32, device=query.device)
    for begin in range(0, count, QUERIES):
        piece = slice(begin, begin + QUERIES)
        q = query[:, :, piece].float().reshape(rows, kv_heads, -1, query.shape[-1])
        scores = torch.matmul(q, k).mul_(scale).view(rows, heads, -1, key.shape[2])
        if allowed is not None:
            scores.masked_fill_(~allowed[:, :, piece], -torch.inf)
        total = torch.logsumexp(scores, dim=-1)
        base = total.masked_fill(total == -torch.inf, 0.0)
        weights = scores.sub_(base[..., None]).exp_().view(rows, kv_heads, -1, key.shape[2])
        output[:, piece] = torch.matmul(weights, v).view(rows, heads, -1, dim).transpose(1, 2)
        lse[:, piece] = total.transpose(1, 2)
    return output, lse


class OutsideOfGradients(torch.autograd.Function):
    """Output that was not computed by torch, in the graph of the query: backward through it is an error."""

    @staticmethod
    def forward(_context: Any, _query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """The output as it is."""
        return output

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("there are no gradients through attention over an offloaded past")


def visible(
    first: int, keys: int, q_offset: int, queries: int, begins: torch.Tensor | None, device: Any
) -> torch.Tensor | None:
    """Which keys, in columns from `first` on, each query sees: [rows or 1, 1, queries, keys]; None for all."""
    if begins is not None and bool((begins <= first).all()):
        begins = None
    if begins is None and queries == 1:
        return None
    columns = torch.arange(first, first + keys, device=device)
    places = torch.arange(q_offset, q_offset + queries, device=device)
    allowed = (columns <= places[:, None])[None, None]
    return allowed if begins is None else allowed & (columns >= begins.to(device)[:, None])[:, None, None]


def _left_padding(padding: torch.Tensor) -> torch.Tensor:
    tokens = padding.bool()
    pads = (~tokens).sum(dim=1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    if not torch.equal(tokens, columns >= pads[:, None]):
        raise ValueError("attention_mask hides tokens that are not at the beginning of their row: pad on the left")
    return pads


def _check_options(dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout is {dropout}; attn_implementation={NAME!r} has none: call model.eval()")
    for name, value in options.items():
        asks_nothing = value is None or value is (name == "is_causal")
        if name not in _UNDERSTOOD and not asks_nothing:
            raise ValueError(
                f"{name}= is not understood by attn_implementation={NAME!r}, which is plain causal attention: no "
                "sliding window, soft cap, sinks or biases; load the model with another attn_implementation"
            )
