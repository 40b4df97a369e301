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
    collect_readers,
    compiled_readers,
    device_readers,
    file_readers,
    flower_readers,
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
            "compression/wire.py:_read_stage_ids",
            "compression/wire.py:PayloadReader.read_array",
            "compression/entropy/golomb.py:read_exp_golomb",
            "compression/entropy/zstd.py:decompress",
            "compression/entropy/indices.py:_read_mask_bits",
            "compression/entropy/levels.py:read_labels",
            "compression/entropy/golomb.py:read_narrow_bits",
            "compression/entropy/golomb.py:read_binary_values",
            "compression/entropy/golomb.py:_read_unary_stream",
            "compression/entropy/zstd.py:ByteShuffle.decode",
            "compression/entropy/zstd.py:Zstd.decode",
        ),
        "codec-deltas": _entry(codec_readers.deltas),
        "edge-bodies": _entry(codec_readers.edge_bodies, "compression/wire.py:read_peer_frame"),
        "kept-residuals": _entry(codec_readers.kept_residuals, "device/training/client_state.py:load_arrays"),
        "kept-variates": _entry(codec_readers.kept_variates, "tasks/local_algorithms/scaffold.py:restore_variate"),
        "mqtt-status": _entry(
            message_readers.status,
            "coordinator/fleet/telemetry_writer.py:TelemetryWriter.on_message",
            "core/protocol.py:load_json",
            "core/safe_parsing.py:parse_json",
        ),
        "mqtt-heartbeat": _entry(
            message_readers.heartbeat, "coordinator/fleet/telemetry_writer.py:TelemetryWriter.on_message"
        ),
        "mqtt-capabilities": _entry(message_readers.capabilities, "core/protocol.py:_Message.load"),
        "mqtt-progress": _entry(message_readers.progress),
        "mqtt-answer": _entry(message_readers.answer, "coordinator/execution/messaging.py:DeviceRpc.on_reply"),
        "mqtt-command": _entry(
            message_readers.commands,
            "device/mqtt/session.py:MessageDispatcher._on_message",
            "device/diagnostics/json_log.py:_parse_query",
            "device/state_dir.py:parse_lockout",
        ),
        "mqtt-topics": _entry(message_readers.topics),
        "mqtt-packets": _entry(
            broker_readers.packets,
            "coordinator/brokers/packets.py:PacketReader.feed",
            *(
                f"coordinator/brokers/packets.py:_decode_{kind}"
                for kind in ("connect", "publish", "puback", "subscribe", "unsubscribe")
            ),
        ),
        "mqtt-connections": _entry(
            broker_readers.connections, "coordinator/brokers/embedded_broker.py:ClientConnection.data_received"
        ),
        "peer-messages": _entry(
            message_readers.neighbours, "strategies/peer_algorithms/gossip_node.py:decode_peer_message"
        ),
        "peer-chunks": _entry(
            message_readers.chunks,
            "device/peers/collective_messages.py:decode_message",
            "device/peers/collective_link.py:CollectiveLink._take",
        ),
        "metric-sums": _entry(message_readers.metric_sums, "core/metrics.py:MetricSet.decode"),
        "peer-frames": _entry(message_readers.frames, "device/peers/peer_connection.py:_parse_header"),
        "peer-certificates": _entry(
            message_readers.shown_certificates, "device/peers/peer_connection.py:verify_certificate"
        ),
        "join-enrol": _entry(
            join_readers.enrolments,
            "coordinator/enrolment/enrolment_service.py:EnrolmentService.enroll",
            "coordinator/enrolment/enrolment_service.py:_load_public_key",
            "coordinator/pki.py:verify_request",
        ),
        "join-renew": _entry(
            join_readers.renewals, "coordinator/enrolment/enrolment_service.py:RenewalService.renew"
        ),
        "join-reenroll": _entry(
            join_readers.reenrolments,
            "coordinator/enrolment/enrolment_service.py:RenewalService.reenroll",
            "coordinator/enrolment/enrolment_service.py:_parse_certificate",
        ),
        "join-certificates": _entry(
            join_readers.certificates,
            "coordinator/pki.py:parse_revocation_number",
            "coordinator/pki.py:_load_certificate",
            "coordinator/pki.py:_load_key",
            "device/enrolment/certificates.py:_load_certificate",
            "system/diagnostics.py:check_certificate",
            "core/protocol.py:_certificate",
        ),
        "join-answers": _entry(
            join_readers.coordinator_answers,
            "system/https_client.py:_parse_json_response",
            "device/rollouts/download.py:parse_json_response",
            "device/enrolment/certificates.py:_load_key",
            "device/flower/supernode.py:_parse_clone_reason",
        ),
        "openid-answers": _entry(
            join_readers.openid_answers,
            "coordinator/api/sign_in.py:_parse_object",
            "coordinator/api/sign_in.py:verify_id_token",
        ),
        "operator-api": _entry(
            api_readers.operator_api,
            "coordinator/api/server.py:_require_valid_json.guard",
            "storage/queries/filters.py:decode_cursor",
            "core/safe_parsing.py:parse_message",
        ),
        "page-feed": _entry(api_readers.feed_requests),
        "fleet-api": _entry(
            api_readers.fleet_api,
            "coordinator/flower/superlink.py:SuperLink._decode_reply",
            "coordinator/flower/superlink.py:FlowerFleetServicer.handle",
            "core/fleet_messages.py:parse_protobuf",
            "coordinator/flower/superlink.py:FlowerFleetServicer._check_node",
        ),
        "fleet-headers": _entry(
            api_readers.fleet_headers,
            "coordinator/flower/superlink.py:FlowerFleetServicer.authenticate",
            "coordinator/flower/signatures.py:_compute_age",
            "coordinator/flower/signatures.py:_verify",
            "coordinator/flower/signatures.py:get_public_key",
            "coordinator/flower/signatures.py:_parse_public_key",
            "coordinator/flower/signatures.py:NonceMemory.add",
        ),
        "fleet-stock": _entry(
            api_readers.stock_replies,
            "coordinator/flower/stock_messages.py:decode_objects",
            "coordinator/flower/stock_messages.py:_decode_record",
            "coordinator/flower/stock_messages.py:_decode_array",
            "coordinator/flower/stock_messages.py:measure_object",
            "coordinator/flower/superlink.py:_decode_stock_reply",
        ),
        "fleet-replies": _entry(api_readers.replies, "strategies/peer_algorithms/gossip_node.py:decode_messages"),
        "fleet-instructions": _entry(
            api_readers.instructions,
            "device/flower/supernode.py:SuperNode.pull",
            "device/flower/supernode.py:_parse_header",
        ),
        "file-run": _entry(
            file_readers.run_files,
            "core/config.py:load_run",
            "core/config.py:parse_run_text",
            "core/safe_parsing.py:parse_toml",
        ),
        "file-faults": _entry(file_readers.fault_scripts, "simulation/faults.py:load_faults"),
        "file-profiles": _entry(
            file_readers.profiles, "simulation/profiles.py:load_catalogue", "simulation/profiles.py:_parse_file"
        ),
        "file-graph": _entry(file_readers.graphs, "strategies/peer_algorithms/topology.py:_read_json"),
        "file-node-hosts": _entry(file_readers.node_hosts),
        "file-ssh-hosts": _entry(
            file_readers.ssh_hosts, "provision/ssh_host.py:parse_hosts", "provision/ssh_host.py:_list_json_lines"
        ),
        "file-join": _entry(file_readers.join_files, "device/enrolment/join_file.py:JoinFile.parse"),
        "file-token": _entry(file_readers.tokens, "core/protocol.py:JoinToken.parse"),
        "file-operator": _entry(file_readers.operator_files, "system/api_client.py:load_operator_file"),
        "file-coordinator": _entry(file_readers.coordinator_files, "coordinator/directory.py:_read_settings"),
        "operator-answers": _entry(file_readers.operator_answers, "system/api_client.py:_parse_reply"),
        "card-user-data": _entry(
            file_readers.cards_user_data,
            "provision/card_files.py:_parse_yaml",
            "provision/card_files.py:_check_depth",
        ),
        "card-preseed": _entry(file_readers.cards_preseed, "provision/card_files.py:render_preseed"),
        "ssh-facts": _entry(file_readers.board_facts, "provision/ssh_provisioning.py:_parse_device"),
        "history-places": _entry(file_readers.places, "storage/queries/filters.py:decode_cursor"),
        "shard-npz": _entry(
            shard_readers.shards,
            "tasks/datasets/array_files.py:read_npz",
            "tasks/datasets/array_files.py:_read_member",
        ),
        "shard-in-place": _entry(shard_readers.shards_in_place, "tasks/datasets/array_files.py:_store_member"),
        "shard-card": _entry(shard_readers.cards, "tasks/datasets/shards.py:read_metadata"),
        "shard-idx": _entry(
            shard_readers.idx_files,
            "tasks/datasets/array_files.py:read_idx",
            "tasks/datasets/array_files.py:_read_decompressed",
        ),
        "shard-cifar": _entry(shard_readers.cifar_batches, "tasks/datasets/cifar.py:_read_binary_batch"),
        "shard-picture": _entry(shard_readers.pictures, "tasks/datasets/class_folders.py:_decode_picture"),
        "shard-text": _entry(
            shard_readers.texts,
            "tasks/datasets/table_files.py:iterate_table",
            "tasks/configured/text.py:HashedNgrams.compute",
        ),
        "shard-sound": _entry(
            shard_readers.sounds,
            "tasks/datasets/class_folders.py:read_sound",
            "tasks/datasets/class_folders.py:_decode_samples",
        ),
        "shard-csv": _entry(
            shard_readers.tables,
            "tasks/datasets/table_files.py:CsvTable.__enter__",
            "tasks/datasets/table_files.py:CsvTable._read_rows",
            "tasks/datasets/table_files.py:_load_numbers",
        ),
        "shard-parquet": _entry(
            shard_readers.parquet_files,
            "tasks/datasets/parquet_files.py:ParquetTable._open",
            "tasks/datasets/parquet_files.py:_measure_pages",
            "tasks/datasets/parquet_files.py:_parse_struct",
        ),
        "shard-arrow": _entry(
            shard_readers.arrow_files,
            "tasks/datasets/arrow_files.py:_Message.parse",
            "tasks/datasets/arrow_files.py:_parse_schema",
            "tasks/datasets/arrow_files.py:_Message.read_values",
            "tasks/datasets/arrow_files.py:_read_classes",
        ),
        "shard-parquet-pictures": _entry(
            shard_readers.pictures_in_parquet,
            "tasks/datasets/parquet_files.py:ParquetTable._read_classes",
            "tasks/datasets/parquet_files.py:ParquetTable.read_pictures",
        ),
        "shard-arrow-pictures": _entry(
            shard_readers.pictures_in_arrow, "tasks/datasets/arrow_files.py:ArrowTable.read_pictures"
        ),
        "shard-arrow-state": _entry(shard_readers.arrow_folders, "tasks/datasets/arrow_files.py:_read_json"),
        "shard-motion": _entry(shard_readers.motion_sets, "tasks/motionsense.py:_load_arrays"),
        "data-gradient": _entry(
            shard_readers.gradients,
            "tasks/datasets/sample_updates.py:_read_npz",
            "tasks/datasets/sample_updates.py:read_sample_update",
        ),
        "infer-rows": _entry(
            shard_readers.rows,
            "tasks/datasets/array_files.py:read_npy",
            "device/inference/onnx_model.py:_read_csv_file",
        ),
        "infer-requests": _entry(
            device_readers.inference_requests, "device/inference/server.py:_RequestHandler._parse_rows"
        ),
        "infer-named-rows": _entry(device_readers.inference_rows, "device/inference/table_rows.py:parse_lines"),
        "infer-model": _entry(
            device_readers.model_facts,
            "device/inference/onnx_model.py:_parse_metadata",
            "device/inference/onnx_model.py:_create_session",
        ),
        "disk-journal": _entry(
            storage_readers.journals,
            "storage/journal/file_format.py:_read_header",
            "storage/journal/file_format.py:_read_record",
            "storage/journal/record_encoding.py:_decode_header",
        ),
        "disk-records": _entry(storage_readers.records, "storage/journal/record_encoding.py:_decode_header"),
        "disk-states": _entry(
            storage_readers.states,
            "storage/state_serialisation.py:_read_arrays",
            "storage/state_serialisation.py:_read_metadata",
            "storage/state_serialisation.py:_read_payload",
            "storage/state_serialisation.py:_StateDecoder.decode",
        ),
        "disk-tensors": _entry(storage_readers.tensors, "storage/state_serialisation.py:_read_arrays"),
        "disk-job-results": _entry(storage_readers.job_results, "storage/checkpoints.py:open_tensor_bytes"),
        "disk-checkpoints": _entry(storage_readers.checkpoint_notes, "storage/checkpoints.py:_read_manifest"),
        "compiled-tasks": _entry(
            compiled_readers.artefacts,
            "tasks/compiled/artefact.py:_parse_header",
            "tasks/compiled/artefact.py:parse_artefact",
            "tasks/compiled/artefact.py:CompiledManifest.parse",
        ),
        "compiled-graphs": _entry(
            compiled_readers.graphs,
            "tasks/compiled/board/graph_reader.py:_read_tensor",
            "tasks/compiled/board/protobuf_fields.py:unpack",
            "tasks/compiled/board/protobuf_fields.py:_to_float",
        ),
        "disk-compiled": _entry(compiled_readers.cache_entries, "tasks/compiler/cache.py:parse_entry"),
        "flower-projects": _entry(
            flower_readers.app_projects, "flower/app_folder.py:read_app", "flower/app_job.py:merge_config"
        ),
        "flower-bundles": _entry(flower_readers.bundles, "flower/app_bundle.py:_read_bundle"),
        "flower-modules": _entry(flower_readers.app_modules),
        "flower-replies": _entry(
            flower_readers.replies,
            "flower/app_messages.py:decode_message",
            "flower/app_codec.py:ChangeCodec.decode",
            "flower/app_messages.py:read_metrics",
            "flower/app_messages.py:_decode_value",
        ),
        "flower-messages": _entry(flower_readers.messages, "flower/app_messages.py:split_envelope"),
        "flower-states": _entry(flower_readers.kept_states),
        "flower-requests": _entry(flower_readers.requests),
        "disk-bases": _entry(storage_readers.bases, "tasks/adaptation/base_file.py:load_base"),
        "disk-base-names": _entry(
            storage_readers.base_names, "tasks/adaptation/base_catalogue.py:BaseCatalogue._read_names"
        ),
        "disk-run-rows": _entry(storage_readers.run_rows, "storage/lineage.py:_parse_run_record"),
        "disk-backup": _entry(
            storage_readers.backups,
            "coordinator/backup.py:_extract_archive",
            "coordinator/backup.py:_read_manifest",
        ),
        "disk-device": _entry(
            device_readers.states,
            "device/state_dir.py:DeviceStateDir.load",
            "device/state_dir.py:load_pending_enrolment",
            "device/state_dir.py:DeviceStateDir.next_session_no",
        ),
        "disk-notes": _entry(
            device_readers.notes,
            "device/updates/protocol.py:read_health",
            "device/updates/protocol.py:read_request",
            "device/updates/protocol.py:read_status",
            "device/updates/slots.py:Slots.load_record",
            "device/inference/deployments.py:ModelStore.load",
            "device/hardware/step_rate.py:_load",
            "device/training/gossip_worker.py:load_node_instruction",
            "device/updates/installations.py:load_report",
            "device/state_dir.py:check_not_locked_out",
        ),
        "disk-logbook": _entry(device_readers.logbooks, "device/diagnostics/json_log.py:read_lines"),
        "collect-file": _entry(collect_readers.collect_files, "device/collect/settings.py:load_collect_file"),
        "collect-messages": _entry(
            collect_readers.messages,
            "device/collect/mqtt_source.py:MqttSource._on_message",
            "device/collect/readings.py:parse_payload",
        ),
        "collect-csv": _entry(
            collect_readers.csv_lines,
            "device/collect/line_parser.py:LineParser._split",
            "device/collect/line_parser.py:parse_time",
        ),
        "collect-json": _entry(collect_readers.json_lines, "device/collect/line_parser.py:LineParser.parse_line"),
        "collect-places": _entry(collect_readers.places, "device/collect/line_source.py:FilePlace.parse"),
        "collect-examples": _entry(collect_readers.examples, "device/collect/file_store.py:check_example"),
        "disk-collected": _entry(
            collect_readers.states,
            "device/collect/store_state.py:read_store_state",
            "device/collect/row_store.py:count_whole_rows",
        ),
        "disk-forgetting": _entry(
            collect_readers.forget_requests,
            "device/collect/forgetting.py:read_forget_request",
            "device/collect/forgetting.py:_SegmentCut._should_go",
        ),
        "disk-labels": _entry(collect_readers.row_labels, "system/row_labels.py:_parse_line"),
        "collect-serial": _entry(
            collect_readers.serial_lines,
            "device/collect/serial_source.py:SerialSource._take_line",
            "device/collect/serial_source.py:parse_line",
        ),
        "collect-label-files": _entry(
            collect_readers.label_files,
            "device/collect/label_files.py:_read_tasks",
            "device/collect/label_files.py:_read_cells",
            "device/collect/label_files.py:_read_span",
            "device/collect/label_files.py:_parse_nested",
        ),
        "collect-yolo": _entry(
            collect_readers.yolo_folders,
            "device/collect/label_files.py:read_label_file",
            "device/collect/label_files.py:_read_yolo",
            "device/collect/label_files.py:_parse_box",
        ),
        "collect-answers": _entry(collect_readers.answers, "device/collect/answers.py:_parse_object"),
        "disk-uncertain": _entry(
            collect_readers.uncertain_times, "device/collect/uncertain_times.py:read_uncertain_times"
        ),
        "disk-shard-uses": _entry(collect_readers.shard_uses, "device/training/shard_uses.py:read_shard_uses"),
        "disk-drift": _entry(device_readers.drift_references, "device/drift_watch.py:read_reference"),
        "secure-adverts": _entry(
            device_readers.secure_adverts,
            "core/secure_aggregation/messages.py:Advert.decode",
            "core/secure_aggregation/keys.py:CertificateIdentity.verify",
        ),
        "disk-consents": _entry(device_readers.consents, "device/secure_worker.py:load_consents"),
        "disk-conditions": _entry(
            device_readers.conditions,
            "core/conditions.py:parse_conditions",
            "core/conditions.py:parse_run_conditions",
            "device/conditions/run_conditions.py:_parse_question",
            "device/conditions/gate.py:_read_pause",
            "device/conditions/budgets.py:BudgetUsage._load",
        ),
        "confined-process": _entry(device_readers.confined_messages, "system/process_messages.py:read_message"),
        "report-archive": _entry(device_readers.reports, "device/diagnostics/diagnostic_report.py:read_report"),
        "bundle": _entry(
            bundle_readers.bundles, "system/bundles/archive.py:read_bundle", "system/bundles/archive.py:_read_header"
        ),
        "bundle-manifest": _entry(bundle_readers.manifests, "system/bundles/archive.py:BundleManifest.decode"),
        "bundle-wheel": _entry(bundle_readers.wheels, "system/bundles/wheels.py:check_wheel"),
        "bundle-signatures": _entry(
            bundle_readers.signatures,
            "system/bundles/signatures.py:_parse_object",
            "system/bundles/signatures.py:Signatures.decode",
            "system/bundles/signatures.py:SignerList.decode",
        ),
        "bundle-signed": _entry(bundle_readers.signed_manifests, "system/bundles/archive.py:SignedManifest.decode"),
        "bundle-keys": _entry(bundle_readers.signing_keys, "system/bundles/keys.py:load_public_key"),
    }
)

INSIDE: Mapping[str, str] = MappingProxyType(
    {
        "core/config.py:SimulationSection.start": "a text of a run file, checked as its section is made",
        "system/object_storage.py:_read_state": "own state, at most 64 KB; whatever else is there counts as none",
        "device/hardware/providers.py:ProviderChoice._read": "likewise, at most 16 KB",
        "tasks/local_algorithms/example_privacy.py:parse_account": "own state, at most 8 MB; its tests damage it",
        "coordinator/execution/site_records.py:RoundIndex.load": "own state; its tests damage it",
        "coordinator/execution/site_records.py:load_content": "own state, with a digest; its tests damage it",
        "tasks/datasets/parquet_files.py:_to_array": "what pyarrow has decoded, as long as it says",
        "device/flower/supernode.py:RequestSigner.__init__": "the own private key",
        "device/drift_watch.py:_read_features": "own state, a pair of numbers; whatever else is there counts as none",
        "core/secure_aggregation/keys.py:CertificateIdentity.__init__": "the own certificate, and the fleet's",
        "core/secure_aggregation/keys.py:add_mask": "the own key stream, of whole words",
        "device/secure_worker.py:SecureWorker._send_update": "words of the own trainer; others are a `ValueError`",
        "strategies/synchronous/secure_rounds.py:SecureRounds._add_vector": "words whose number is checked before",
        "system/row_labels.py:parse_example_time": "names of this board's files; others are a `ValueError`",
        "device/collect/microphone.py:compute_dbfs": "samples of a whole number of bytes, each of any value",
        "device/collect/forgetting.py:iterate_rows": "rows of a state and segments that `disk-forgetting` has read",
        "cli/starters/compile.py:_parse_options": "words of the command line, by the caller's own hand",
        "simulation/sweep.py:_parse_list": "words of the command line, by the caller's own hand",
        "simulation/sweep.py:_parse_value": "words of the command line, by the caller's own hand",
        "simulation/trials.py:_KeptTrials.load": "own state; its tests damage it",
        "tasks/configured/table.py:parse_time": "a cell of a file of this board's; others are a `ValueError`",
        "cli/flower.py:run_demo": "a wheel that was written a moment before",
        "history/tracking.py:MlflowTracker._create_version": "an export of a moment before",
        "tasks/compiler/gradient_check.py:GraphRunner.__init__": "a graph that was compiled a moment before",
        "compression/entropy/zstd.py:compress": "encodes",
        "compression/entropy/zstd.py:_decompress_empty": (
            "reads nothing: the end of a stream that `decompress` reads"
        ),
        "compression/error_feedback.py:ErrorFeedback.state": "encodes",
        "compression/codec.py:PerLayerStage.encode": "encodes",
        "compression/entropy/zstd.py:_shuffle_bytes": "encodes",
        "tasks/compiled/board/bound_graph.py:make_session": (
            "a graph that `compiled-graphs` has read; what a runtime does with more is not for a fuzzer of Python"
        ),
        "tasks/datasets/shards.py:_iterate_sample_hashes": "of hashes that were computed a line before",
        "tasks/local_algorithms/scaffold.py:ClientControlVariate.to_arrays": "encodes",
        "tasks/local_algorithms/scaffold.py:_decode_server_variate": (
            "bytes of a length that is checked, any of which are numbers"
        ),
        "coordinator/split/rest_process.py:RestServer._step": (
            "labels of a length that the service has checked; what follows is a body of a codec"
        ),
        "device/training/split_exchange.py:CoordinatorExchange.__call__": (
            "a loss of a length that is checked; what follows is a body of a codec"
        ),
        "device/training/split_exchange.py:CoordinatorExchange._send": "the coordinator's refusal, over its own TLS",
        "tasks/analyses/analysis.py:pack_result": "encodes",
        "tasks/analyses/analysis.py:read_result": "what `pack_result` made a round before",
        "cli/stats.py:_run_at_coordinator": "the coordinator's own result, over its own TLS",
        "coordinator/runs/scales.py:_load_result": "the result of a run that this coordinator made",
        "simulation/simulated_run.py:_find_scales": "the result of a simulation that ended a line before",
        "engine/assembly/job.py:build_job.decode": "any bytes are a result of a part; their number is checked",
        "strategies/job_strategy.py:JobStrategy.aggregate": "any bytes are a result of a job",
        "flower/app_strategy.py:AppStrategy.aggregate": "any bytes are a result of a job",
        "flower/app_pack.py:write_app_wheel": "encodes",
        "flower/server_link.py:ServerLink.collect": "encodes",
        "device/inference/server.py:main": "what the process that became this one wrote a moment before",
        "flower/app_runtime.py:make_body_record": "encodes",
        "flower/app_runtime.py:decode_content": (
            "a message between the halves of an exported app, which Flower carries"
        ),
        "system/confinement.py:": "the command line that the parent made",
        "system/processes.py:call_in_subprocess": "the answer of a child of this very program",
        "system/processes.py:serve_call": "the question of this child's parent",
        "simulation/backends/process_pool.py:read_message": "the other end is this very program",
        "simulation/backends/process_pool.py:main": "a file that the parent has just written",
        "simulation/backends/partitioned_data.py:load_data": "files that the parent has just written",
        "device/hardware/step_rate.py:_parse_result": "the answer of a child of this very program",
        "device/updates/updater.py:can_reach": "the answer of a child of this very program",
        "device/diagnostics/timings.py:measure_import_times": "the answer of a child of this very program",
        "device/hardware/board_reader.py:read_cuda_version": "a file of the board's own system",
        "device/hardware/health.py:read_wireless_bits_per_s": "the kernel's answer",
        "device/mqtt/session.py:MqttSession._is_transferring": "the kernel's answer",
        "device/diagnostics/diagnostic_report.py:make_report": "what was dumped in the same line",
        "device/diagnostics/diagnostic_report.py:_make_device_section": (
            "speeds.json: see disk-notes; a report goes on without it"
        ),
        "device/peers/peer_connection.py:PeerTls.load": "the files of the own join",
        "coordinator/monitoring/metrics.py:load_grafana_dashboard": "a file of the package",
        "simulation/profiles.py:_load_built_in": "a file of the package",
        "coordinator/backup.py:_write_archive": "writes",
        "coordinator/runs/recovery.py:_has_crashed_too_often": "a note of its own; a damaged one counts anew",
        "coordinator/runs/recovery.py:_load_final_incarnations": "a note of its own; rows replace a damaged one",
        "system/bundles/wheels.py:compute_unpacked_bytes": "the index of a wheel whose hash a signed manifest gave",
        "flower/app_bundle.py:make_bundle": "writes",
        "system/bundles/keys.py:load_private_key": "the operator's own key, by the parser of join-certificates",
        "provision/payload.py:_check_signer_list": "the operator's own list, which boards read as bundle-signatures",
        "provision/payload.py:_load_public_key": "as bundle-keys, and refuses all but Ed25519",
        "provision/card_files.py:render_user_data": (
            "a file of the package; the card's own goes through `_parse_yaml`"
        ),
        "provision/payload.py:write_overlay": "writes",
        "provision/payload.py:write_tar": "writes",
        "provision/ssh_provisioning.py:_HostProvisioning._check_data": (
            "the answer of edgefl on the board, by the parser of ssh-facts"
        ),
        "provision/boot_partition.py:_open_image": "an image that is unpacked block by block, into a file of its own",
        "device/diagnostics/diagnostic_report.py:write_report": "writes",
        "history/traces.py:_read_memory": "a note of its own; a damaged one is refused",
        "history/traces.py:OtlpTracker._send": "protobuf's own parser, of which any error is a refusal",
        "cli/history.py:parse_time": "a time that the operator has typed",
        "cli/device_join.py:_read_card_task": "the operator's own card, by the parser of shard-card",
        "storage/journal/file_format.py:_is_durable": "looks for records in a damaged journal: see disk-journal",
        "tasks/export/model_export.py:quantise_model": "a file that was exported a moment ago",
        "tasks/export/model_export.py:open_session": "a file that was exported a moment ago",
    }
)
"""Functions that call a parser, and yet read nothing that somebody outside chose: with the reason."""
