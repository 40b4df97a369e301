"""Flower's Fleet API on the wire: names of its requests, and its protobuf messages by their field numbers.

The messages are built with protobuf's public interface: no release of Flower has to be there for them, nor a certain
one. Maps are lists of entries here, which is the same on the wire. A test compares them with Flower's own.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessages

FLEET_PREFIX = "/v1/fleet/"
ACTIVATE_NODE, DEACTIVATE_NODE, SEND_HEARTBEAT = "activate-node", "deactivate-node", "send-node-heartbeat"
PULL_MESSAGES, PULL_OBJECT = "pull-messages", "pull-object"
PUSH_MESSAGES, PUSH_OBJECT = "push-messages", "push-object"
CONFIRM_MESSAGE, GET_RUN, GET_FAB = "confirm-message-received", "get-run", "get-fab"

MEDIA_TYPE = "application/protobuf"

_PACKAGE = "edgefl.fleet"
_SCHEMA = """
Node: uint64 node_id 1
ObjectTree: string object_id 1, *ObjectTree children 2
Error: sint64 code 1, string reason 2
Metadata: uint64 run_id 1, string message_id 2, uint64 src_node_id 3, uint64 dst_node_id 4,
    string reply_to_message_id 5, string group_id 6, double ttl 7, string message_type 8, double created_at 9,
    ?uint64 src_task_id 10, ?uint64 dst_task_id 11
Message: Metadata metadata 1, RecordDict content 2, Error error 3

DoubleList: *double vals 1
SintList: *sint64 vals 1
UintList: *uint64 vals 1
BoolList: *bool vals 1
StringList: *string vals 1
BytesList: *bytes vals 1
Array: string dtype 1, *int32 shape 2, string stype 3, bytes data 4
MetricRecordValue: |double double 1, |sint64 sint64 2, |uint64 uint64 3, |DoubleList double_list 21,
    |SintList sint_list 22, |UintList uint_list 23
ConfigRecordValue: |double double 1, |sint64 sint64 2, |uint64 uint64 3, |bool bool 4, |string string 5,
    |bytes bytes 6, |DoubleList double_list 21, |SintList sint_list 22, |UintList uint_list 23,
    |BoolList bool_list 24, |StringList string_list 25, |BytesList bytes_list 26
ArrayItem: string key 1, Array value 2
MetricItem: string key 1, MetricRecordValue value 2
ConfigItem: string key 1, ConfigRecordValue value 2
ArrayRecord: *ArrayItem items 1
MetricRecord: *MetricItem items 1
ConfigRecord: *ConfigItem items 1
RecordItem: string key 1, |ArrayRecord array_record 2, |MetricRecord metric_record 3, |ConfigRecord config_record 4
RecordDict: *RecordItem items 1

Scalar: |double double 1, |uint64 uint64 6, |sint64 sint64 8, |bool bool 13, |string string 14, |bytes bytes 15
ConfigEntry: string key 1, Scalar value 2
RunStatus: string status 1, string sub_status 2, string details 3
Run: uint64 run_id 1, string fab_id 2, string fab_version 3, *ConfigEntry override_config 4, string fab_hash 5,
    string pending_at 6, string starting_at 7, string running_at 8, string finished_at 9, RunStatus status 10,
    string flwr_aid 11, string federation 12, uint64 bytes_sent 13, uint64 bytes_recv 14,
    double clientapp_runtime 15, string primary_task_type 16, ?uint64 primary_task_id 17, uint64 series_id 18,
    string account_name 19
TextEntry: string key 1, string value 2
Fab: string hash_str 1, bytes content 2, *TextEntry verifications 3

ActivateNodeRequest: bytes public_key 1, double heartbeat_interval 2
ActivateNodeResponse: uint64 node_id 1
DeactivateNodeRequest: uint64 node_id 1
DeactivateNodeResponse:
SendNodeHeartbeatRequest: Node node 1, double heartbeat_interval 2
SendNodeHeartbeatResponse: bool success 1
Reconnect: uint64 reconnect 1
PullMessagesRequest: Node node 1, *string message_ids 2
PullMessagesResponse: Reconnect reconnect 1, *Message messages_list 2, *ObjectTree message_object_trees 3
PushMessagesRequest: Node node 1, *Message messages_list 2, *ObjectTree message_object_trees 3,
    *double clientapp_runtime_list 4
ResultEntry: string key 1, uint32 value 2
PushMessagesResponse: Reconnect reconnect 1, *ResultEntry results 2, *string objects_to_push 3, string session_id 4
PushObjectRequest: Node node 1, uint64 run_id 2, string object_id 3, bytes object_content 4, string session_id 5
PushObjectResponse: bool stored 1
PullObjectRequest: Node node 1, uint64 run_id 2, string object_id 3
PullObjectResponse: bool object_found 1, bool object_available 2, bytes object_content 3
ConfirmMessageReceivedRequest: Node node 1, uint64 run_id 2, string message_object_id 3
ConfirmMessageReceivedResponse:
GetRunRequest: Node node 1, uint64 run_id 2
GetRunResponse: Run run 1
GetFabRequest: Node node 1, string hash_str 2, uint64 run_id 3
GetFabResponse: Fab fab 1
"""
"""Messages, one a line, with their fields: `*` is repeated, `?` may be absent, of those with `|` one is set."""
_ONEOF = "value"


def _build_messages() -> dict[str, Any]:
    """Returns the classes of the messages by their names."""
    file = FileDescriptorProto(name="edgefl/fleet.proto", package=_PACKAGE, syntax="proto3")
    for line in re.sub(r",\n\s+", ", ", _SCHEMA).split("\n"):
        name, _, fields = line.partition(":")
        if name:
            message = file.message_type.add(name=name)
            if "|" in fields:
                message.oneof_decl.add(name=_ONEOF)
            for field in filter(None, fields.strip().split(", ")):
                _add_field(message, field)
    classes = GetMessages([file], pool=DescriptorPool())
    return {name.removeprefix(f"{_PACKAGE}."): found for name, found in classes.items()}


def _add_field(message: Any, text: str) -> None:
    kind, name, number = text.lstrip("*?|").split(" ")
    described: dict[str, Any] = {"name": name, "number": int(number)}
    if kind[0].isupper():
        described |= {"type": FieldDescriptorProto.TYPE_MESSAGE, "type_name": f".{_PACKAGE}.{kind}"}
    else:
        described["type"] = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    label = FieldDescriptorProto.LABEL_REPEATED if text[0] == "*" else FieldDescriptorProto.LABEL_OPTIONAL
    if text[0] == "|":
        described["oneof_index"] = 0
    elif text[0] == "?":  # protobuf has one that may be absent as the only one of a choice
        described |= {"oneof_index": len(message.oneof_decl), "proto3_optional": True}
        message.oneof_decl.add(name=f"_{name}")
    message.field.add(label=label, **described)


MESSAGES = _build_messages()
"""Classes of all messages by their names."""
Node, ObjectTree, Metadata, Message = (MESSAGES[name] for name in ("Node", "ObjectTree", "Metadata", "Message"))
RecordDict, ConfigRecord, MetricRecord = (MESSAGES[name] for name in ("RecordDict", "ConfigRecord", "MetricRecord"))
RESPONSES: dict[str, Any] = {
    ACTIVATE_NODE: MESSAGES["ActivateNodeResponse"],
    DEACTIVATE_NODE: MESSAGES["DeactivateNodeResponse"],
    SEND_HEARTBEAT: MESSAGES["SendNodeHeartbeatResponse"],
    PULL_MESSAGES: MESSAGES["PullMessagesResponse"],
    PULL_OBJECT: MESSAGES["PullObjectResponse"],
    PUSH_MESSAGES: MESSAGES["PushMessagesResponse"],
    PUSH_OBJECT: MESSAGES["PushObjectResponse"],
    CONFIRM_MESSAGE: MESSAGES["ConfirmMessageReceivedResponse"],
    GET_RUN: MESSAGES["GetRunResponse"],
    GET_FAB: MESSAGES["GetFabResponse"],
}
REQUESTS: dict[str, Any] = {
    method: MESSAGES[found.DESCRIPTOR.name.replace("Response", "Request")] for method, found in RESPONSES.items()
}
"""Classes of the requests, and of their responses, by names of methods."""


def parse_protobuf(kind: Any, content: bytes) -> Any:
    """Returns a message of a class.

    Raises:
        ValueError: the bytes are none.
    """
    message = kind()
    try:
        message.ParseFromString(content)
    except DecodeError:
        raise ValueError(f"{len(content)} bytes that are no {kind.DESCRIPTOR.name}") from None
    return message


def make_content(*values: tuple[str, str, str | bytes]) -> Any:
    """Returns the content of a message: record, name and value of each."""
    content = RecordDict()
    for record, name, value in values:
        item = content.items.add(key=record).config_record.items.add(key=name)
        setattr(item.value, "bytes" if isinstance(value, bytes) else "string", value)
    return content


def find_value(content: Any, record: str, name: str) -> Any:
    """Returns a value of a configuration record in the content of a message.

    Raises:
        LookupError: there is none.
    """
    for item in content.items:
        for entry in item.config_record.items if item.key == record else ():
            if entry.key == name and (kind := entry.value.WhichOneof(_ONEOF)) is not None:
                return getattr(entry.value, kind)
    raise LookupError(f"no {name} in the record {record}")


def has_record(content: Any, record: str) -> bool:
    return any(item.key == record for item in content.items)
