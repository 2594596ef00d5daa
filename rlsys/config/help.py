"""The text of --help: keys with their default, allowed values and description, from the schema's source.

Descriptions are the strings below the attributes. They are extracted here, on demand, because pydantic's
use_attribute_docstrings parses the source of every class at import.
"""

import inspect
import textwrap
from functools import cache, partial

from pydantic._internal._docs_extraction import extract_docstrings_from_cls

from rlsys.config import arguments
from rlsys.config.compat.reader import REFERENCE, absolute_names, compat_table
from rlsys.config.introspect import allowed, default_of, job_name, leaves, nearest, sections, shown
from rlsys.config.presets import preset_names, presets_folder
from rlsys.config.schema.base import Section
from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError

_WIDTH = 110
_descriptions = cache(partial(extract_docstrings_from_cls, use_inspect=True))
_USUAL: dict[str, list[str]] = read_table(__file__, "usual_keys.toml")


def help_text(schema: type[Section], *words: str) -> str:
    """The keys of a job that most runs set, or those that `words` name; ConfigError for a word that no key holds."""
    if words:
        return "\n".join(dict.fromkeys(text for word in words for text in _topic(schema, word)))
    parts = [
        f"{inspect.getdoc(schema)}\n\npython -m trainer.main_{job_name(schema)} [options] [key=value ...]\n",
        f"{arguments.__doc__}\nPresets in {presets_folder()}\n  {', '.join(preset_names())}\n",
    ]
    for title, keys in _USUAL.items():
        parts += [title, *(_short(schema, key, with_type=False) for key in keys if key in leaves(schema)), ""]
    outer = ", ".join(path for path in sections(schema) if path and path.count(".") < 2)
    more = f"There are {len(leaves(schema))} keys; --help WORD shows those of a section: {outer}"
    return "\n".join([*parts, textwrap.fill(more, _WIDTH, break_on_hyphens=False)])


def _topic(schema: type[Section], word: str) -> list[str]:
    """The keys that a word names: a section, a key by any of its names, or a part of names."""
    keys, key = leaves(schema), compat_table(schema).canonical(word)
    if key in keys:
        return [_whole(schema, key)]
    paths = [path for path in keys if word == "all" or path.startswith(f"{key}.")]
    paths = paths or [path for path in keys if word.lower() in path]
    if not paths:
        near = nearest(key, tuple(keys))
        hint = f"did you mean {' or '.join(near)}?" if near else "--help all lists all keys"
        raise ConfigError(f"--help {word}: no key or section has this in its name; {hint}")
    return [_whole(schema, path) if len(paths) == 1 else _short(schema, path) for path in paths]


def _short(schema: type[Section], key: str, *, with_type: bool = True) -> str:
    field, (section, _, name) = leaves(schema)[key], key.rpartition(".")
    default = default_of(field)
    follows = REFERENCE.fullmatch(absolute_names(str(default), key))
    head = f"{key}   (follows {follows[1]})" if follows else f"{key}={shown(default)}"
    words = describe(sections(schema)[section], name) + (f" [{allowed(field)}]" if with_type else "")
    return f"  {head}\n{textwrap.indent(textwrap.fill(words, _WIDTH), ' ' * 6)}"


def _whole(schema: type[Section], key: str) -> str:
    """The help of one key: also the other names by which it may be set."""
    names = ", ".join(compat_table(schema).names_of(key))
    return _short(schema, key) + (f"\n      other names: {names}" if names else "")


def describe(section: type[Section], name: str) -> str:
    """The description of a key, from its section or the nearest parent class that has one."""
    return next(filter(None, (_descriptions(cls).get(name) for cls in section.__mro__ if issubclass(cls, Section))), "")
