"""verl's tool configuration: a YAML file whose `tools` are classes of ours and tools of MCP servers."""

from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from rlsys.agent.mcp import tools_of_servers
from rlsys.agent.tools import Tool, load_target
from rlsys.utils.errors import ConfigError, raised_as

ENTRIES = dict[str, list[dict[str, object]]]


def read_entries(path: str, form: object, *, key: str) -> Any:
    """What is in the YAML file that the setting `key` names, with its references resolved; ConfigError if there is none
    or it is not of the form, a type.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{key}={path}: local file not found")
    with raised_as(ConfigError, f"{key}={path}"):  # whatever YAML, its references and its form may raise
        entries = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        msgspec.convert(entries, form)
    return entries


def tools_of_yaml(path: str, *, key: str) -> list[Tool]:
    """The tools of verl's tool configuration: `tools`, a list of {class_name, config, tool_schema}.

    An entry with `mcp` stands for the tools that the servers of its `mcp_servers_config_path` offer.
    """
    tools = []
    for number, entry in enumerate(read_entries(path, ENTRIES, key=key).get("tools", ())):
        if servers := entry.get("mcp"):
            selected = servers.get("tool_selected_list") or ()
            tools += tools_of_servers(servers["mcp_servers_config_path"], selected, key=key)
            continue
        schema, name = entry.get("tool_schema"), str(entry.get("class_name", ""))
        if not schema or "." not in name:
            raise ConfigError(f"{key}={path}: tool {number} needs class_name (module.Class) and tool_schema")
        load_target(name, key=key)
        tools.append(Tool(schema["function"]["name"], schema, name, "execute", config=entry.get("config") or {}))
    return tools
