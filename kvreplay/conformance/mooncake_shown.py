"""How a transcript shows what connector and worker say to each other."""

import json

from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake.producer import Producer
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata
from kvreplay.engine.connector import KVConnectorOutput


def shown_metadata(metadata: MooncakeConnectorMetadata) -> dict[str, Json]:
    shown: dict[str, Json] = {}
    if metadata.reqs_to_recv:
        shown["to_recv"] = {
            key_of(engine_id): {name: [meta.transfer_id, meta.local_block_ids] for name, meta in metas.items()}
            for engine_id, metas in metadata.reqs_to_recv.items()
        }
    if metadata.reqs_to_send:
        shown["to_send"] = {name: [transfer_id, ids] for name, (transfer_id, ids) in metadata.reqs_to_send.items()}
    if metadata.reqs_not_processed:
        shown["not_processed"] = sorted(metadata.reqs_not_processed)
    return shown


def shown_output(output: KVConnectorOutput) -> dict[str, Json]:
    names = ("finished_sending", "finished_recving", "failed_recving", "invalid_block_ids")
    return {name: sorted(ids) for name in names if (ids := getattr(output, name))}


def shown_entries(producer: Producer) -> dict[str, Json]:
    return {
        key_of(transfer_id): {
            "p_req_id": entry.p_req_id,
            "ready": entry.ready,
            "blocks": entry.local_block_ids,
            "expires": entry.ready,
            "need_send": entry.need_send,
            "sent": entry.sent,
            "sending": entry.sending,
        }
        for transfer_id, entry in producer.entries.items()
    }


def key_of(parameter: object) -> str:
    """A request's parameter as a name in JSON."""
    return parameter if isinstance(parameter, str) else json.dumps(parameter)


def state_of(entry: Json) -> str:
    if entry["ready"]:
        return "ready"
    return "announced" if entry["p_req_id"] else "placeholder"
