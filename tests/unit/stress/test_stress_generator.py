"""Generated KV: the same for everybody, finite, like a model's, and compared to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvtierd.core.geometry import Geometry
from kvtierd.core.stored_form import Codec, rotation
from kvtierd.gpu.codec import BlockCodec
from kvtierd.stress import generator
from kvtierd.stress.content import PRESETS, BlockId, Content

SHAPE = Geometry(block_size=32, layers=2, kv_heads=2, k_dim=64, v_dim=48)


def block_of(content: Content, name: BlockId) -> np.ndarray:
    block = np.zeros(content.geometry.slot_bytes, np.uint8)
    content.fill(name, block)
    return block


def wide(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def test_an_element_depends_on_its_place_alone_and_on_every_part_of_it() -> None:
    whole, piece = np.zeros((8, 2, 64), np.uint16), np.zeros((3, 2, 64), np.uint16)
    ones, nothing = np.ones((2, 64), np.float32), np.zeros((2, 64), np.float32)
    generator.fill(whole, generator.part_key(1, 0, 0, 0), 100, ones, nothing)
    generator.fill(piece, generator.part_key(1, 0, 0, 0), 102, ones, nothing)
    assert np.array_equal(whole[2:5], piece)
    for other in ((2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1)):
        generator.fill(piece, generator.part_key(*other), 102, ones, nothing)
        assert np.mean(whole[2:5] == piece) < 0.05, other
    assert np.mean(whole[:, 0] == whole[:, 1]) < 0.05, "heads differ"
    assert np.mean(whole[0] == whole[1]) < 0.05, "tokens differ"


def test_contents_never_change_between_versions_or_machines() -> None:
    words = block_of(Content(7, SHAPE), BlockId(3, 5)).view(np.uint16)
    assert words[:6].tolist() == GOLDEN_FIRST
    assert int(words.astype(np.uint64).sum()) == GOLDEN_SUM


def test_values_are_finite_and_nearly_normal_and_keys_have_outlier_channels() -> None:
    content = Content(1, PRESETS["llama-3.1-8b"][0])
    k, v = (wide(part) for part in content.layer(BlockId(0, 9), 3, lossy=False))
    assert np.isfinite(k).all()
    assert np.isfinite(v).all()
    k_scale, k_bias, v_scale, _ = content.channels(3)
    scaled = (k - k_bias) / k_scale
    assert abs(scaled.mean()) < 0.02
    assert abs(scaled.std() - 1) < 0.02
    kurtosis = np.mean(((v / v_scale) / (v / v_scale).std()) ** 4)
    assert 2.5 < kurtosis < 3.2, "3 is normal; four bytes give a little less"
    means = np.abs(k.mean(axis=0))
    assert ((means > 6).sum(axis=1) == 4).all()
    assert (np.sort(means, axis=1)[:, :-4] < 0.6).all()


def test_one_flipped_bit_is_one_wrong_element_of_its_layer() -> None:
    content = Content(2, SHAPE)
    block = block_of(content, BlockId(0, 1))
    assert content.wrong_elements(BlockId(0, 1), block) == {}
    for layer in range(SHAPE.layers):
        for offset in (0, SHAPE.k_bytes - 1, SHAPE.k_bytes, SHAPE.layer_bytes - 1):
            for bit in (0, 7):
                wrong = block.copy()
                wrong[layer * SHAPE.layer_stride + offset] ^= 1 << bit
                assert content.wrong_elements(BlockId(0, 1), wrong) == {layer: 1}


def test_a_block_in_another_place_is_wrong_nearly_everywhere() -> None:
    content = Content(2, SHAPE)
    block = block_of(content, BlockId(0, 1))
    elements = SHAPE.layer_bytes // 2
    for name in (BlockId(0, 2), BlockId(1, 1)):
        wrong = content.wrong_elements(name, block)
        assert all(wrong[layer] > 0.9 * elements for layer in range(SHAPE.layers))


@pytest.mark.parametrize("factor", [1.0, 2.0**-60, 2.0**-126, 300.0])
def test_fp8_of_the_generator_is_that_of_the_codec_to_the_bit(factor: float) -> None:
    content, codec = Content(3, SHAPE), BlockCodec(SHAPE)
    block = block_of(content, BlockId(0, 4))
    words = block.view(np.uint16)
    words[:] = (np.float32(factor) * wide(words)).astype(np.float32).view(np.uint32) >> 16
    words[5:40] = 0
    encoded, decoded = np.zeros(codec.layout.slot_bytes, np.uint8), np.zeros_like(block)
    codec.encode(block, encoded)
    codec.decode(encoded, decoded)
    for layer in range(SHAPE.layers):
        (keys, values), wanted = content.parts(block, layer), content.parts(decoded, layer)
        mine, n = (keys.copy(), values.copy()), rotation(SHAPE)
        generator.turn(mine[0], n)
        for part in mine:
            generator.quantise(part)
        generator.turn(mine[0], n)
        assert np.array_equal(mine[0], wanted[0])
        assert np.array_equal(mine[1], wanted[1])


def test_decoded_blocks_are_compared_with_what_fp8_makes_of_them() -> None:
    content, codec = Content(3, SHAPE), BlockCodec(SHAPE)
    block = block_of(content, BlockId(0, 4))
    encoded, decoded = np.zeros(codec.layout.slot_bytes, np.uint8), np.zeros_like(block)
    codec.encode(block, encoded)
    codec.decode(encoded, decoded)
    assert content.wrong_elements(BlockId(0, 4), decoded, Codec.FP8_E4M3) == {}
    assert content.wrong_elements(BlockId(0, 4), decoded), "it is not the exact block"
    codec.scales(encoded)[1, 0] *= 2  # a scale of another block
    codec.decode(encoded, decoded)
    wrong = content.wrong_elements(BlockId(0, 4), decoded, Codec.FP8_E4M3)
    assert list(wrong) == [1]
    assert wrong[1] > 0.9 * SHAPE.block_size * SHAPE.k_dim


def test_keys_follow_prompts_and_a_later_stream_goes_on_where_the_one_before_ends() -> None:
    content = Content(4, SHAPE)
    whole, shared = content.keys((1, 3), (9, 2)), content.keys((1, 3), (8, 2))
    assert np.array_equal(whole[:3], shared[:3])
    assert not (whole[3:] == shared[3:]).all(axis=1).any()
    assert content.ids((1, 3), (9, 2)) == [BlockId(1, 0), BlockId(1, 1), BlockId(1, 2), BlockId(9, 3), BlockId(9, 4)]
    assert not np.array_equal(content.keys((9, 2)), whole[3:])


@pytest.mark.parametrize("change", [{"dtype": "fp16"}, {"layout": "hnd"}, {"v_dim": 0}])
def test_other_forms_are_refused(change: dict[str, object]) -> None:
    fields = {"block_size": 32, "layers": 1, "kv_heads": 1, "k_dim": 64, "v_dim": 64} | change
    with pytest.raises(ValueError, match="generated"):
        Content(1, Geometry(**fields))  # type: ignore[arg-type]


GOLDEN_FIRST = [16179, 49136, 49123, 48670, 48931, 16175]
GOLDEN_SUM = 465_560_955
