"""vLLM's cache tensors as pages: every order of axes that keeps a block together, in place and staged, and refusals."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

BLOCKS, LAYERS, HEADS, TOKENS, DIM = 6, 3, 2, 32, 16
# As vLLM names them: layers, blocks, heads, tokens, content.
TOGETHER = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
APART = ["LHBNC", "BHLNC"]
SIZES = dict(zip("LBHNC", (LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM), strict=True))


def cache(order, dtype="bfloat16", seed=0):
    """One tensor a layer, [blocks, heads, tokens, content], over one storage in this order."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn([SIZES[axis] for axis in order], generator=generator).to(getattr(torch, dtype))
    return list(whole.permute([order.index(axis) for axis in "LBHNC"]))


def layout(blocks=BLOCKS, **spec):
    from kvtierd.connectors.vllm_tensors import CacheLayout

    made = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": DIM, "head_size_v": DIM, **spec}
    return CacheLayout(SimpleNamespace(**made), blocks, "TEST")


def pages_of(tensors, staged=False, **options):
    from kvtierd.connectors.vllm_tensors import engine_pages

    return engine_pages(tensors, [f"layer{i}" for i in range(len(tensors))], layout(**options), staged=staged)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("order", TOGETHER)
def test_blocks_go_out_and_come_back_in_every_order(order, dtype, staged, monkeypatch):
    from kvtierd.connectors import vllm_device_pages

    source, target = cache(order, dtype, 1), cache(order, dtype, 2)
    before = [layer.clone() for layer in target]
    geometry, out = pages_of(source, staged)
    monkeypatch.setattr(vllm_device_pages, "STAGING_BYTES", 2 * geometry.block_bytes)  # so that it takes several turns
    _, back = pages_of(target, staged)
    assert (geometry.kv_heads, geometry.k_dim, geometry.v_dim) == (HEADS, DIM, DIM)
    slots, sums = np.zeros((3, geometry.slot_bytes), np.uint8), np.zeros((3, geometry.layers), np.uint64)
    out.store([5, 0, 3], slots, sums, out.fence())
    assert back.load([1, 4, 2], slots, sums, back.fence()) == 3
    for there, here, old in zip(source, target, before, strict=True):
        assert (here[[1, 4, 2]] == there[[5, 0, 3]]).all()
        assert (here[[0, 3, 5]] == old[[0, 3, 5]]).all()


def test_staged_or_in_place_the_bytes_are_the_same():
    tensors = cache("LBHNC")
    stored = []
    for staged in (False, True):
        geometry, pages = pages_of(tensors, staged)
        slots, sums = np.zeros((2, geometry.slot_bytes), np.uint8), np.zeros((2, geometry.layers), np.uint64)
        pages.store([4, 2], slots, sums, None)
        stored.append((slots, sums))
    assert all((a == b).all() for a, b in zip(*stored, strict=True))


@pytest.mark.parametrize("staged", [False, True])
def test_case_03_a_load_ends_at_the_first_damaged_block(staged):
    geometry, pages = pages_of(cache("LBHNC"), staged)
    slots, sums = np.zeros((3, geometry.slot_bytes), np.uint8), np.zeros((3, geometry.layers), np.uint64)
    pages.store([0, 1, 2], slots, sums, None)
    slots[1, 5] ^= 1
    assert pages.load([3, 4, 5], slots, sums, None) == 1


@pytest.mark.parametrize("order", APART)
def test_blocks_that_lie_in_pieces_are_refused(order):
    with pytest.raises(ValueError, match="layer0 is no single run"):
        pages_of(cache(order))


def test_case_07_each_order_and_each_set_of_layers_is_another_layout():
    from kvtierd.connectors.vllm_tensors import engine_pages

    names = {pages_of(cache(order))[0].layout for order in ("LBHNC", "LBNHC")}
    tensors = cache("LBHNC")
    names.add(engine_pages(tensors, ["a", "b", "c"], layout())[0].layout)
    assert len(names) == 3


def test_a_kernel_may_use_smaller_blocks_than_the_scheduler():
    tensors = cache("LBHNC")
    geometry, pages = pages_of(tensors, blocks=3, block_size=2 * TOKENS)
    assert geometry.layer_bytes == 2 * tensors[0][0].nbytes
    slots, sums = np.zeros((1, geometry.slot_bytes), np.uint8), np.zeros((1, geometry.layers), np.uint64)
    pages.store([2], slots, sums, None)
    assert pages.load([0], slots, sums, None) == 1
    assert all((layer[:2] == layer[4:]).all() for layer in tensors)


def test_packed_formats_are_bytes():
    import torch

    tensors = [torch.zeros((BLOCKS, HEADS, TOKENS, DIM + 4), dtype=torch.uint8) for _ in range(LAYERS)]
    geometry, _ = pages_of(tensors)
    assert (geometry.dtype, geometry.v_dim) == ("uint8", 0)
    assert geometry.layer_bytes == tensors[0][0].nbytes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: [*tensors[:2], tensors[2][:, :1]], "layers differ"),
        (lambda tensors: [*tensors[:2], tensors[2].float()], "layers differ"),
        (lambda tensors: [tensor[:5] for tensor in tensors], "5 blocks"),
        (lambda tensors: [tensor.to("meta") for tensor in tensors], "meta"),
    ],
)
def test_tensors_that_cannot_be_served_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        pages_of(change(cache("LBHNC")))


def test_pages_of_one_storage_are_copied_together():
    _, pages = pages_of(cache("LBHNC"))
    assert pages._joined is not None
    assert list(itertools.chain(pages._joined.shape)) == [LAYERS, BLOCKS, HEADS * TOKENS * 2 * DIM * 2]
