"""BlockList: as a list and as an array."""

import msgspec
import numpy as np

from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata, decode_request, encode
from kvreplay.kv.block_list import BlockList

IDS = BlockList(np.array([3, 1, 2], np.int64))


def test_it_reads_like_a_list() -> None:
    assert IDS == [3, 1, 2]
    assert IDS != [3, 1]
    assert IDS[0] == 3
    assert type(IDS[0]) is int
    assert IDS[-2:] == [1, 2]
    assert [type(block_id) for block_id in IDS] == [int] * 3
    assert 2 in IDS
    assert 4 not in IDS
    assert repr(IDS) == "[3, 1, 2]"
    assert not BlockList(np.zeros(0, np.int64))


def test_it_is_the_array_it_was_made_of() -> None:
    assert np.asarray(IDS, np.int64) is IDS.array


def test_a_list_with_the_same_ids_has_the_same_bytes_on_the_wire() -> None:
    def pull(blocks: BlockList | list[int]) -> bytes:
        return encode(
            MooncakeXferMetadata(
                remote_hostname="D0",
                remote_port=1,
                remote_tp_size=1,
                remote_tp_rank=0,
                req_blocks={"r": ("x", [blocks])},
                kv_caches_base_addr=[],
                block_lens=[],
                kv_block_lens=[],
            )
        )

    assert pull(IDS) == pull([3, 1, 2])
    assert decode_request(pull(IDS)).req_blocks == {"r": ("x", [[3, 1, 2]])}
    assert msgspec.msgpack.decode(pull(IDS))["req_blocks"] == {"r": ["x", [[3, 1, 2]]]}
