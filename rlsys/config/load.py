"""From files and dotted overrides to a validated, frozen configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from rlsys.config.schema import PPOConfig
from rlsys.config.schema_base import Section
from rlsys.utils.errors import ConfigError

S = TypeVar("S", bound=Section)


def defaults(schema: type[Section]) -> dict[str, Any]:
    """The tree of a schema's defaults; a linked key holds the reference to the key it follows."""
    tree: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            tree[name] = defaults(field.annotation)
        elif isinstance(extra, dict) and "link" in extra:
            tree[name] = f"${{{extra['link']}}}"
        else:
            value = field.get_default(call_default_factory=True)
            tree[name] = list(value) if isinstance(value, tuple) else value
    return tree


def load_config(argv: Sequence[str], schema: type[S] = PPOConfig) -> S:
    """The configuration that `argv` (without the program's name) asks for; ConfigError lists all that is wrong."""
    from omegaconf import OmegaConf

    tree = OmegaConf.create(defaults(schema))
    tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([a for a in argv if "=" in a]))
    try:
        return schema.model_validate(OmegaConf.to_container(tree, resolve=True))
    except ValidationError as error:
        raise ConfigError(str(error)) from None
