"""Which built-in grader a data source gets; graders are imported when first needed."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pkgutil import resolve_name

from rlsys.rewards.sandbox.run import GUARANTEES, ISOLATION, available_guarantees
from rlsys.telemetry.log import get_logger
from rlsys.utils.data_files import read_table
from rlsys.utils.errors import ConfigError

log = get_logger(__name__)

ROUTES: dict[str, str] = {name: to for to, names in read_table(__file__, "sources.toml").items() for name in names}
"""Data source -> module:function; a trailing * stands for any ending."""


def route(data_source: str) -> str | None:
    """The entry of ROUTES for a data source: the exact name first, then the longest prefix."""
    matching = [name for name in ROUTES if fnmatchcase(data_source, name)]
    return ROUTES[max(matching, key=lambda name: (name == data_source, len(name)))] if matching else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: object = None,
    *,
    sandbox: Mapping[str, object] | None = None,
    unknown_score: float | None = None,
    **reward_kwargs: object,
) -> object:
    """Grade by data source; `reward_kwargs` go to the grader, those in `sandbox` to one that runs programs.

    A data source without a grader gets `unknown_score`; without one it is a ConfigError.
    """
    if (target := route(data_source)) is None:
        if unknown_score is None:
            raise _no_grader(data_source)
        return unknown_score
    if target.startswith("code:"):
        reward_kwargs |= sandbox or {}
    return resolve_name(f"rlsys.rewards.{target}")(solution_str, ground_truth, **reward_kwargs)


def check_sources(data_sources: Iterable[str], *, runs_here: bool = True) -> None:
    """ConfigError for a data source without a grader or its package, and for programs that cannot be confined here.

    A warning where this machine can confine them, but not hide the outside.
    """
    data_sources = tuple(data_sources)
    targets = [route(data_source) for data_source in data_sources]
    if None in targets:
        raise _no_grader(data_sources[targets.index(None)])
    if any(target and target.startswith("math:") for target in targets) and find_spec("math_verify") is None:
        raise ConfigError("math_verify, which grades these rows, is not installed: pip install 'math-verify>=0.9'")
    if runs_here and any(target and target.startswith("code:") for target in targets):
        available = available_guarantees()
        if lacking := [guarantee for guarantee in GUARANTEES if guarantee not in available]:
            needs = "they need Landlock and seccomp, that is Linux 5.13 or later and a container that allows them"
            raise ConfigError(f"programs are not run here: {', '.join(lacking)} cannot be restricted; {needs}")
        if ISOLATION not in available:
            what = "can see that files outside exist, and the size of their folder is only checked now and then"
            log.warning("no namespaces in this container: graded programs %s", what)


def _no_grader(data_source: str) -> ConfigError:
    how = f"set reward.custom_reward_function.path to a file with a compute_score, or use one of {', '.join(ROUTES)}"
    return ConfigError(f"no built-in reward function for data_source {data_source!r}: {how}")
