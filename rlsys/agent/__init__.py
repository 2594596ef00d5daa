"""Agents: episodes of many turns with exact tokens, tools, environments and workflows."""
