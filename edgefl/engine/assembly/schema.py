"""The JSON schema of run files."""

from __future__ import annotations

from typing import get_args

from edgefl.core.config import (
    AUTO_STRATEGY,
    Quantity,
    RunConfig,
    StrategySection,
)
from edgefl.core.errors import EdgeflError
from edgefl.core.settings import list_options, make_schema
from edgefl.core.types import (
    Json,
)
from edgefl.strategies.registry import (
    find_strategy,
    list_strategy_names,
)
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.tasks.registry import list_task_names, list_task_options


def make_run_schema() -> Json:
    """Returns the JSON schema (2020-12) of run files, with the options of every strategy and task that is here.

    A name that is not built in, such as `module:Class`, may have any options: its class is not there for an editor.
    """
    schema = make_schema(list_options(RunConfig), RunConfig.__doc__)
    strategy, name_schema = schema["properties"]["strategy"], {"type": "string", "default": StrategySection().name}
    strategy["properties"]["name"] = {**name_schema, "examples": [*list_strategy_names(), AUTO_STRATEGY]}
    strategy["allOf"] = []
    shared = make_schema(list_options(StrategyConfig), StrategyConfig.__doc__)["properties"]
    for name in (*list_strategy_names(), AUTO_STRATEGY):
        is_auto = name == AUTO_STRATEGY
        try:
            found = find_strategy(name_schema["default"] if is_auto else name)
            options = make_schema(list_options(found), found.__doc__)
        except EdgeflError:  # a broken package must not hide the others
            continue
        for key, option in options["properties"].items():
            if "description" in shared.get(key, {}):
                option.setdefault("description", shared[key]["description"])
        if is_auto:
            options["properties"]["minimise"] = {"enum": [*get_args(Quantity)], "default": "time"}
        options["properties"]["name"] = {"const": name}
        is_default = name == name_schema["default"]
        condition = {"properties": {"name": {"const": name}}, "required": [] if is_default else ["name"]}
        strategy["allOf"].append({"if": condition, "then": options})
    task_options = schema["properties"]["task"]["additionalProperties"]
    schema["properties"]["task"]["additionalProperties"] = {"type": [*task_options["type"], "array"]}
    schema["properties"]["run"]["properties"]["task"]["examples"] = list(list_task_names())
    schema["allOf"] = [
        {
            "if": {"properties": {"run": {"properties": {"task": {"const": name}}}}},
            "then": {"properties": {"task": make_schema(list_task_options(name))}},
        }
        for name in list_task_names()
    ]
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["job"]}]
    schema["properties"]["run"].pop("required")
    schema["anyOf"][0]["properties"] = {"run": {"required": ["task"]}}
    schema["properties"]["job"]["required"] = ["name"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "edgefl run file", **schema}
