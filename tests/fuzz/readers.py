"""The registry: every reader of bytes from outside, and which functions of edgefl it stands for.

`test_readers.py` holds it against the source: whoever parses stands here, or in `INSIDE` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fuzz import (
    api_readers,
    broker_readers,
    bundle_readers,
    codec_readers,
    device_readers,
    file_readers,
    join_readers,
    message_readers,
    shard_readers,
    storage_readers,
)
from fuzz.reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A reader before it is made; `covers` are functions as `file:name`, all of which its seeds run through."""

    make: Callable[[Path], Reader]
    covers: tuple[str, ...] = ()


def _entry(make: Callable[[Path], Reader], *covers: str) -> Entry:
    return Entry(make=make, covers=covers)


READERS: Mapping[str, Entry] = MappingProxyType(
    {
        "codec-bodies": _entry(
            codec_readers.codec_bodies,
            "compression/wire.py:read_frame",
            "compression/wire.py:_read_stages",
            "compression/wire.py:Reader.array",
            "compression/coding/exp_golomb.py:read_exp_golomb",
            "compression/coding/frames.py:unpacked",
            "compression/coding/indices.py:_read_bits_of",
            "compression/coding/labels.py:read_labels",
            "compression/coding/rice.py:read_narrow_bits",
            "compression/coding/rice.py:read_either",
            "compression/coding/rice.py:_unary_stream",
            "compression/lossless.py:Shuffle.decode",
        ),
        "codec-deltas": _entry(codec_readers.deltas),
        "edge-bodies": _entry(codec_readers.edge_bodies, "compression/wire.py:read_edge_frame"),
        "kept-residuals": _entry(codec_readers.kept_residuals, "device/run_files.py:load_arrays"),
        "kept-variates": _entry(codec_readers.kept_variates, "tasks/variates.py:kept_variate"),
        "mqtt-status": _entry(
            message_readers.status,
            "coordinator/fleet/diary.py:Diary.message",
            "protocol.py:load_json",
            "untrusted.py:parse_json",
        ),
        "mqtt-heartbeat": _entry(message_readers.heartbeat, "coordinator/fleet/diary.py:Diary.message"),
        "mqtt-capabilities": _entry(message_readers.capabilities, "protocol.py:_Message.load"),
        "mqtt-progress": _entry(message_readers.progress),
        "mqtt-answer": _entry(message_readers.answer, "coordinator/dispatch/questions.py:Questions.answered"),
        "mqtt-command": _entry(
            message_readers.commands,
            "device/incoming.py:Incoming._received",
            "device/telling.py:_wanted",
            "device/refusal.py:refusal_in",
        ),
        "mqtt-topics": _entry(message_readers.topics),
        "mqtt-packets": _entry(
            broker_readers.packets,
            "coordinator/brokers/mqtt/packets.py:PacketReader.feed",
            *(
                f"coordinator/brokers/mqtt/packets.py:_decode_{kind}"
                for kind in ("connect", "publish", "puback", "subscribe", "unsubscribe")
            ),
        ),
        "mqtt-connections": _entry(
            broker_readers.connections, "coordinator/brokers/mqtt/connection.py:ClientConnection.data_received"
        ),
        "peer-messages": _entry(message_readers.neighbours, "decentralised/mailbag.py:unpack_peer"),
        "peer-frames": _entry(message_readers.frames, "device/neighbours/peer_frames.py:_parse"),
        "peer-certificates": _entry(
            message_readers.shown_certificates, "device/neighbours/peer_tls.py:verified_name"
        ),
        "join-enrol": _entry(
            join_readers.enrolments,
            "coordinator/joining/enrolment.py:EnrolmentService.enroll",
            "coordinator/joining/enrolment.py:_load_public",
            "coordinator/pki.py:request_key",
        ),
        "join-renew": _entry(join_readers.renewals, "coordinator/joining/renewal.py:RenewalService.renew"),
        "join-readmit": _entry(
            join_readers.readmissions,
            "coordinator/joining/readmission.py:ReadmissionService.readmit",
            "coordinator/joining/readmission.py:_shown",
        ),
        "join-certificates": _entry(
            join_readers.certificates,
            "coordinator/pki.py:revocation_number",
            "coordinator/pki.py:_load_certificate",
            "coordinator/pki.py:_load_key",
            "device/joining/renewal.py:_loaded",
            "findings.py:check_certificate",
            "protocol.py:_certificate",
        ),
        "join-answers": _entry(
            join_readers.coordinator_answers,
            "device/trust.py:_json",
            "device/file_fetch.py:json_answer",
            "device/joining/keys.py:_load_key",
            "device/supernode.py:_reason",
        ),
        "operator-api": _entry(
            api_readers.operator_api,
            "coordinator/asgi.py:sound_json.guard",
            "storage/wanted.py:parse_place",
            "untrusted.py:parse_message",
        ),
        "page-feed": _entry(api_readers.feed_requests),
        "fleet-api": _entry(
            api_readers.fleet_api,
            "coordinator/superlink.py:SuperLink._read",
            "coordinator/superlink.py:FlowerCalls.node_of",
            "coordinator/superlink.py:FlowerCalls.answer",
            "coordinator/superlink.py:FlowerCalls._check_speaker",
            "coordinator/superlink.py:_is_signed",
        ),
        "fleet-replies": _entry(api_readers.replies, "decentralised/mailbag.py:unpack_mail"),
        "fleet-instructions": _entry(api_readers.instructions, "device/supernode.py:SuperNode.pull"),
        "file-run": _entry(
            file_readers.run_files, "config.py:load_run", "config.py:parse_run_text", "untrusted.py:parse_toml"
        ),
        "file-faults": _entry(file_readers.fault_scripts, "simulation/faults.py:load_faults"),
        "file-profiles": _entry(
            file_readers.profiles, "simulation/profiles.py:load_catalogue", "simulation/profiles.py:_table_of"
        ),
        "file-graph": _entry(file_readers.graphs, "decentralised/graph_files.py:_json"),
        "file-node-hosts": _entry(file_readers.node_hosts),
        "file-ssh-hosts": _entry(file_readers.ssh_hosts, "provision/hosts_file.py:parse_hosts"),
        "file-join": _entry(file_readers.join_files, "device/joining/join_file.py:JoinFile.parse"),
        "file-token": _entry(file_readers.tokens, "protocol.py:JoinToken.parse"),
        "file-operator": _entry(file_readers.operator_files, "client.py:load_operator_file"),
        "file-coordinator": _entry(file_readers.coordinator_files, "coordinator/directory.py:_read_settings"),
        "operator-answers": _entry(file_readers.operator_answers, "client.py:_answer"),
        "card-user-data": _entry(
            file_readers.cards_user_data, "provision/cloud_init.py:_parsed", "provision/cloud_init.py:_check_depth"
        ),
        "card-preseed": _entry(file_readers.cards_preseed, "provision/preseed.py:preseed"),
        "ssh-facts": _entry(file_readers.board_facts, "provision/ssh_facts.py:_device"),
        "history-places": _entry(file_readers.places, "storage/wanted.py:parse_place"),
        "shard-npz": _entry(shard_readers.shards, "tasks/npz.py:read_npz", "tasks/npz.py:_read_member"),
        "shard-card": _entry(shard_readers.cards, "tasks/cards.py:read_card"),
        "shard-idx": _entry(shard_readers.idx_files, "tasks/idx.py:read_idx", "tasks/idx.py:_decompressed"),
        "shard-motion": _entry(shard_readers.motion_sets, "tasks/motion_windows.py:_arrays"),
        "data-gradient": _entry(
            shard_readers.gradients, "tasks/gradients.py:_read_npz", "tasks/gradients.py:read_gradient"
        ),
        "infer-rows": _entry(
            shard_readers.rows, "tasks/npz.py:read_npy", "device/inference/inference_inputs.py:_csv"
        ),
        "infer-requests": _entry(
            device_readers.inference_requests, "device/inference/inference_server.py:_Handler._rows"
        ),
        "infer-model": _entry(
            device_readers.model_facts,
            "device/inference/onnx_model.py:_json",
            "device/inference/onnx_model.py:_session",
        ),
        "disk-journal": _entry(
            storage_readers.journals,
            "storage/wal.py:_read_header",
            "storage/wal.py:_read_record",
            "storage/journal_records.py:_unpack",
        ),
        "disk-records": _entry(storage_readers.records, "storage/journal_records.py:_unpack"),
        "disk-states": _entry(
            storage_readers.states,
            "storage/state_files.py:_arrays",
            "storage/state_files.py:_metadata",
            "storage/state_files.py:_content",
            "storage/state_files.py:_Unpacker.unpack",
        ),
        "disk-tensors": _entry(storage_readers.tensors, "storage/state_files.py:_arrays"),
        "disk-checkpoints": _entry(storage_readers.checkpoint_notes, "storage/checkpoints.py:_read_note"),
        "disk-backup": _entry(
            storage_readers.backups, "coordinator/restore.py:_unpacked", "coordinator/restore.py:_manifest"
        ),
        "disk-device": _entry(
            device_readers.states,
            "device/state.py:DeviceState.load",
            "device/state.py:load_pending",
            "device/state.py:DeviceState.next_session_no",
        ),
        "disk-notes": _entry(
            device_readers.notes,
            "device/slots/health.py:read_health",
            "device/slots/inbox.py:read_request",
            "device/slots/status.py:read_status",
            "device/slots/layout.py:Slots.record",
            "device/inference/model_store.py:ModelStore.read",
            "device/board/speed_book.py:_load",
            "device/neighbours/node_runner.py:NodeRunner.kept_order",
            "device/installations.py:Installations._read_note",
            "device/refusal.py:check_welcome",
        ),
        "disk-logbook": _entry(device_readers.logbooks, "device/logbook.py:read_lines"),
        "report-archive": _entry(device_readers.reports, "device/report/report_archive.py:read_report"),
        "bundle": _entry(bundle_readers.bundles, "bundles/archive.py:read_bundle", "bundles/archive.py:_due"),
        "bundle-manifest": _entry(bundle_readers.manifests, "bundles/manifest.py:Manifest.load"),
        "bundle-wheel": _entry(bundle_readers.wheels, "bundles/wheels.py:wheel_names"),
        "bundle-keys": _entry(bundle_readers.signing_keys, "bundles/keys.py:load_public"),
    }
)

INSIDE: Mapping[str, str] = MappingProxyType(
    {
        "compression/coding/frames.py:packed": "encodes",
        "compression/coding/frames.py:_nothing": "reads nothing: the end of a stream that `unpacked` reads",
        "compression/feedback.py:ErrorFeedback.state": "encodes",
        "compression/layers.py:Layers.encode": "encodes",
        "compression/lossless.py:_planes": "encodes",
        "tasks/splits.py:sample_hashes": "of hashes that were computed a line before",
        "tasks/variates.py:OwnVariate.arrays": "encodes",
        "tasks/scaffold.py:_unpacked": "bytes of a length that is checked, any of which are numbers",
        "adapters/app_messages.py:body_record": "encodes",
        "adapters/app_messages.py:unpack": "a message between the halves of an exported app, which Flower carries",
        "child_process.py:ask_child": "the answer of a child of this very program",
        "child_process.py:answer_once": "the question of this child's parent",
        "simulation/worker.py:read_message": "the other end is this very program",
        "simulation/worker.py:main": "a file that the parent has just written",
        "simulation/data.py:load_data": "files that the parent has just written",
        "device/board/speed_book.py:_entry": "the answer of a child of this very program",
        "device/slots/proving.py:reaches": "the answer of a child of this very program",
        "device/board/timings.py:import_times": "the answer of a child of this very program",
        "device/board/jetson.py:cuda_version": "a file of the board's own system",
        "device/board/link_quality.py:wireless_bits_per_s": "the kernel's answer",
        "device/mqtt_session.py:Session._is_moving": "the kernel's answer",
        "device/report/field_report.py:make_report": "what was dumped in the same line",
        "device/report/field_report.py:_device": "speeds.json: see disk-notes; a report goes on without it",
        "device/supernode.py:_client_app.run": "the header that `pull` has read before",
        "device/neighbours/peer_tls.py:PeerTls.load": "the files of the own join",
        "coordinator/superlink.py:FlowerCalls.is_foreign": "what `answer` has refused before, for the event's text",
        "coordinator/monitoring/metrics.py:grafana_dashboard": "a file of the package",
        "simulation/profiles.py:_built_in": "a file of the package",
        "coordinator/backup.py:_pack": "writes",
        "coordinator/runs/resuming.py:_died_too_often": "a note of its own; a damaged one counts anew",
        "coordinator/runs/resuming.py:_written_at_end": "a note of its own; rows replace a damaged one",
        "bundles/wheels.py:unpacked_bytes": "the index of a wheel whose hash a signed manifest gave",
        "bundles/keys.py:load_private": "the operator's own key, by the parser of join-certificates",
        "provision/extras.py:_public": "as bundle-keys, and refuses all but Ed25519",
        "provision/cloud_init.py:user_data": "a file of the package; the card's own goes through `_parsed`",
        "provision/overlay.py:write_overlay": "writes",
        "provision/preseed.py:_checked_toml": "what was written a line before",
        "provision/ssh.py:write_tar": "writes",
        "provision/ssh_join.py:_Board._check_data": "the answer of edgefl on the board, by the parser of ssh-facts",
        "provision/boot_image.py:_opened": "an image that is unpacked block by block, into a file of its own",
        "device/report/report_archive.py:write_report": "writes",
        "cli/history.py:parse_time": "a time that the operator has typed",
        "cli/device_shards.py:_card_task": "the operator's own card, by the parser of shard-card",
        "storage/wal.py:_is_durable": "looks for records in a damaged journal: see disk-journal",
        "tasks/onnx_check.py:quantised": "a file that was exported a moment ago",
        "tasks/onnx_check.py:open_session": "a file that was exported a moment ago",
    }
)
"""Functions that call a parser, and yet read nothing that somebody outside chose: with the reason."""
