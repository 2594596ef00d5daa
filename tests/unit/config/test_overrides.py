"""The override grammar, alone and as the loader applies it."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import load_config
from rlsys.config.overrides import Override, format_value, parse_override, parse_value
from rlsys.utils.errors import ConfigError

KEYS = st.from_regex(r"[A-Za-z_][\w-]{0,8}(\.[A-Za-z_][\w-]{0,8}){0,3}", fullmatch=True)
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT.filter(bool), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_every_value_reads_back_as_it_was_written(value: Any) -> None:
    parsed = parse_value(format_value(value))
    assert parsed == value
    assert type(parsed) is type(value)


@given(st.sampled_from(["", "+", "++"]), KEYS, VALUES)
def test_every_override_reads_back(op: str, key: str, value: Any) -> None:
    text = f"{op}{key}={format_value(value)}"
    assert parse_override(text) == Override(key, value, text=text)


@given(st.text(max_size=40))
def test_any_text_is_an_override_or_a_clean_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_override(text).text == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1_000", "1_000"),
        ("0.5_2", "0.5_2"),
        ("007", "007"),
        ("1e-6", 1e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("1E5", 1e5),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("Null", None),
        ("none", "none"),
        ("", ""),
        (" a b ", "a b"),
        ("a=b", "a=b"),
        ("/x/y-1.parquet", "/x/y-1.parquet"),
        ("~/x", "~/x"),
        (r"a\,b", "a,b"),
        ("'3'", "3"),
        ("'true'", "true"),
        (r"'it\'s'", "it's"),
        (r"'C:\new'", r"C:\new"),
        (r"'a\\'", "a\\"),
        ('"a,b"', "a,b"),
        ("[]", []),
        ("['a','b']", ["a", "b"]),
        ("[a, b , 3]", ["a", "b", 3]),
        ("[[1],[2,[3]]]", [[1], [2, [3]]]),
        ("{}", {}),
        ("{a:1}", {"a": 1}),
        ("{a: b c, 'd e': [1]}", {"a": "b c", "d e": [1]}),
        ("{a: {b: null}}", {"a": {"b": None}}),
        ("${a.b}", "${a.b}"),
        ("${oc.env:X,1}", "${oc.env:X,1}"),
        ("[${a},{b: ${c}}]", ["${a}", {"b": "${c}"}]),
        ("{{ messages[0], 'a' }}", "{{ messages[0], 'a' }}"),
        ("{%- for m in messages %}{{ m.content }}{% endfor %}", "{%- for m in messages %}{{ m.content }}{% endfor %}"),
    ],
)
def test_values_of_hydras_grammar(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_value("nan"))


def test_the_last_value_of_a_key_wins() -> None:
    assert load_config(["data.seed=1", "data.seed=2"]).data.seed == 2


def test_keys_are_added_to_an_open_section_and_changed_with_and_without_plus() -> None:
    key = "actor_rollout_ref.model.override_config"
    cfg = load_config([f"{key}.a.b=1", f"+{key}.a.b=2", f"++{key}.c=[x]", f"+{key}.d={{e: 5}}"])
    assert cfg.actor_rollout_ref.model.override_config == {"a": {"b": 2}, "c": ["x"], "d": {"e": 5}}


def test_an_open_section_merges_dicts() -> None:
    key = "data.apply_chat_template_kwargs"
    cfg = load_config([f"{key}={{a: 1, b: {{c: 2}}}}", f"{key}={{b: {{d: 3}}}}"])
    assert cfg.data.apply_chat_template_kwargs == {"a": 1, "b": {"c": 2, "d": 3}}


def test_plus_may_set_a_key_that_was_not_set_before() -> None:
    assert load_config(["+reward_model.reward_kwargs.max_resp_len=8"]).reward.reward_kwargs.max_resp_len == 8


def test_plus_changes_keys_too() -> None:
    assert load_config(["+data.train_batch_size=96"]).data.train_batch_size == 96
    assert load_config(["++data.train_batch_size=96"]).data.train_batch_size == 96
    assert load_config(["++data.seed=9"]).data.seed == 9


def test_tilde_puts_back_the_default() -> None:
    changed = load_config(
        ["data.seed=9", "~data.seed", "~actor_rollout_ref.rollout.n", "algorithm.adv_estimator=remax"]
    )
    assert changed.data.seed == 1
    assert changed.actor_rollout_ref.rollout.n == 1


def test_tilde_takes_out_an_added_key() -> None:
    key = "actor_rollout_ref.model.override_config"
    cfg = load_config([f"+{key}.a=1", f"+{key}.b.c=2", f"~{key}.a", f"~{key}.b.c"])
    assert cfg.actor_rollout_ref.model.override_config == {"b": {}}


def test_tilde_puts_back_a_whole_section() -> None:
    cfg = load_config(["critic.grad_clip=3", "critic.optim.lr=1", "~critic"])
    assert (cfg.critic.grad_clip, cfg.critic.optim.lr) == (1.0, 1e-5)


def test_a_section_may_be_given_as_a_dict() -> None:
    cfg = load_config(["actor_rollout_ref.actor.optim={lr: 1e-4, betas: [0.9, 0.95]}"])
    assert cfg.actor_rollout_ref.actor.optim.betas == (0.9, 0.95)
    assert cfg.actor_rollout_ref.actor.optim.weight_decay == 0.01


def test_a_list_may_stand_in_quotes() -> None:
    cfg = load_config(["critic.optim.betas='[0.9,0.95]'"])
    assert cfg.critic.optim.betas == (0.9, 0.95)
