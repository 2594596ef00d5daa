"""Built-in graders and their routing."""

import threading
import time
from typing import Any

import pytest

from rlsys.rewards import gsm8k, text
from rlsys.rewards import math as math_rewards
from rlsys.rewards.pool.pool import RewardItem, RewardPool, reward_metrics
from rlsys.rewards.registry import ROUTES, check_sources, compute_score, route
from rlsys.utils.errors import ConfigError
from tests.timing import scaled_s


@pytest.mark.parametrize(
    ("answer", "truth", "method", "score"),
    [
        ("so it is #### 42", "42", "strict", 1.0),
        ("#### 1,234", "1234", "strict", 1.0),
        ("#### 1234", "1,234", "strict", 1.0),
        ("#### -7", "-7", "strict", 1.0),
        ("#### 41 no #### 42", "42", "strict", 1.0),
        ("#### 42.", "42", "strict", 0.1),
        ("#### 42.0", "42.0", "strict", 1.0),
        ("#### 41", "42", "strict", 0.1),
        ("it is 42", "42", "strict", 0.0),
        ("####42", "42", "strict", 0.0),
        ("#### 42" + " " * 300, "42", "strict", 0.0),
        ("it is 42", "42", "flexible", 1.0),
        ("it is 42, or rather 43.", "43", "flexible", 1.0),
        ("it is 1,234", " 1234 ", "flexible", 1.0),
        ("it is 43 ... , .", "43", "flexible", 1.0),
        ("no number .", "42", "flexible", 0.0),
        ("", "42", "flexible", 0.0),
    ],
)
def test_gsm8k(answer: str, truth: str, method: Any, score: float) -> None:
    result = gsm8k.compute_score(answer, truth, method=method, format_score=0.1)
    assert (result["score"], result["acc"]) == (score, float(score == 1.0))


def test_graders_give_the_scores_that_are_set() -> None:
    scores = {"score": 2.0, "format_score": 0.5}
    assert gsm8k.compute_score("#### 4", 4, **scores) == {"score": 2.0, "acc": 1.0, "pred": "4"}
    assert gsm8k.compute_score("#### 5", 4, **scores) == {"score": 0.5, "acc": 0.0, "pred": "5"}
    right, wrong = (f"<answer>a</answer> <answer> {answer} </answer>" for answer in ("Paris", "p"))
    assert text.exact_match(right, "paris", **scores) == {"score": 2.0, "acc": 1.0, "pred": "Paris"}
    assert text.exact_match(wrong, "paris", **scores) == {"score": 0.5, "acc": 0.0, "pred": "p"}
    assert text.exact_match("Paris", "paris", **scores) == {"score": 0.0, "acc": 0.0, "pred": ""}


@pytest.mark.parametrize(
    ("pattern", "pred"),
    [(r"code: ([A-Z]+\d+)", "AB12"), (r"[A-Z]+", "AB"), (r"code: (x)?", ""), (r"none", "")],
)
def test_a_pattern_gives_its_group_or_what_it_matched(pattern: str, pred: str) -> None:
    result = text.regex("code: AB12", pattern)
    assert (result["pred"], result["score"]) == (pred, float(pattern != "none"))


def test_gsm8k_refuses_an_unknown_method() -> None:
    with pytest.raises(ValueError, match="strict"):
        gsm8k.extract_solution("1", method="loose")  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{0.5}", r"\frac12", True),
        (r"\boxed{1} then \boxed{x^2+1}", "1+x^2", True),
        (r"\boxed{1}, no, \boxed{2}", "1", False),
        (r"\boxed{(1, 2)}", "(1,2)", True),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", True),
        (r"\boxed{12", "12", False),
        (r"\boxed{12} \boxed{1", "12", True),
        ("12", "12", False),
        (r"\boxed{}", "12", False),
        (r"\boxed{\text{Paris}}", r"\text{Paris}", True),
        (r"\boxed{?}", "?", True),
        (r"\boxed{(1,2)}", "1<x<2", True),
        (r"so $\boxed 4$", "4", True),
        (r"\boxed{3} and so \boxed 4", "4", True),
        (r"\boxed{13}", "13_{8}", False),
        (r"\boxed{13_8}", "13_{8}", True),
        (r"\boxed{\frac{11}{2}}", r"\frac{1}{12}", False),
        (r"\boxed{x^{1}2}", "x^{12}", False),
        (r"\boxed{1 23}", "12 3", False),
        (r"\boxed{\text{ east }}", r"\text{east}", True),
        (r"\boxed{x_1 + 2}", "2+x_1", True),
        (r"\boxed{__import__('os').system('true')}", "1", False),
    ],
)
def test_math_compares_the_last_box_as_mathematics(answer: str, truth: str, right: bool) -> None:
    assert math_rewards.compute_score(answer, truth)["score"] == float(right)


def test_math_outside_the_main_thread_gives_the_same() -> None:
    scores: list[float] = []
    thread = threading.Thread(
        target=lambda: scores.append(math_rewards.compute_score(r"\boxed{\frac{2}{4}}", r"\frac{1}{2}")["score"])
    )
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_mathematics_that_never_ends_is_killed_and_is_a_timeout() -> None:
    with RewardPool(num_workers=1, timeout_s=scaled_s(0.5)) as pool:
        pool.start()
        endless = RewardItem("lighteval/MATH", r"\boxed{\sum_{n=1}^{\infty} \frac{7^{7^{7^{7}}}}{n!}}", "1")
        start = time.monotonic()
        results = pool.score([endless, RewardItem("lighteval/MATH", r"\boxed{2}", "2")])
    assert [(result.status, result.score) for result in results] == [("timeout", 0.0), ("ok", 1.0)]
    assert results[0].seconds < scaled_s(20.0)
    assert reward_metrics(results)["reward/timeouts"] == 1.0
    assert time.monotonic() - start < scaled_s(30.0)


def test_a_sympy_call_deaf_to_signals_costs_its_deadline_and_no_neighbour() -> None:
    endless = RewardItem("lighteval/MATH", r"\boxed{\binom{10^{12}}{10^{9}} \cdot 3}", "7")
    with RewardPool(num_workers=2, timeout_s=scaled_s(1.0)) as pool:
        pool.start()
        results = pool.score([endless, *[RewardItem("lighteval/MATH", r"\boxed{\frac{4}{2}}", "2")] * 20, endless])
    assert [result.status for result in results] == ["timeout", *["ok"] * 20, "timeout"]
    assert all(result.score == 1.0 for result in results[1:-1])
    assert max(result.seconds for result in results) < scaled_s(20.0)
    assert reward_metrics(results)["reward/timeouts"] == 2.0


@pytest.mark.parametrize(
    ("answer", "score", "pred"),
    [("Answer: 7", 1.0, "7"), ("answer: $7$", 1.0, "7"), ("Answer: 6\nAnswer: 7", 1.0, "7"), ("7", -1.0, ""),
     ("Answer: 8", -1.0, "8"), (r"Answer: \boxed{7}", 1.0, "7"), ("Answer: 7" + "." * 300, -1.0, ""),
     (r"so \boxed{7}.", 1.0, "7"), (r"so \boxed{7}" + "." * 100, -1.0, ""), (r"\boxed{7} Answer: 8", -1.0, "8"),
     (r"Answer: the result is $\boxed{7}$.", 1.0, "7"), (r"Answer: 6 and later \boxed{7}", -1.0, "6 and later 7"),
     ("Answer: 7 \nbye", 1.0, "7")],
)  # fmt: skip
def test_dapo_math(answer: str, score: float, pred: str) -> None:
    result = compute_score("math_dapo", answer, "7")
    assert (result["score"], result["acc"], result["pred"]) == (score, float(score > 0), pred)


def test_geometry_rewards_the_form_too() -> None:
    assert compute_score("hiyouga/geometry3k", r"<think>a</think> \boxed{5}", "5")["score"] == pytest.approx(1.0)
    assert compute_score("hiyouga/geometry3k", "\n<think>a</think> \\boxed{5}\n", "5")["score"] == pytest.approx(1.0)
    assert compute_score("hiyouga/geometry3k", r"\boxed{5}", "5")["score"] == pytest.approx(0.9)
    assert compute_score("hiyouga/geometry3k", r"<think>a</think> \boxed{6}", "5")["score"] == pytest.approx(0.1)


MATRIX = "\\begin{bmatrix}\n -7 & 6 \\\\\n 15 & 19 \n \\end{bmatrix}"


@pytest.mark.parametrize(
    ("expression", "truth"),
    [(MATRIX, MATRIX.replace("bmatrix", "pmatrix")), (r"\frac{\sqrt{505}}{7}", r"\frac{\sqrt{505}}{7}"),
     ("x^2 + y^2 + 4x - 6y + 13", "(x + 2)^2 + (y - 3)^2")],
)  # fmt: skip
@pytest.mark.parametrize("text", ["{}", "The answer is {}", "Thus we get\n${}$.", "As $y=2$, the answer is {}."])
def test_the_last_expression_counts_where_nothing_is_boxed(expression: str, truth: str, text: str) -> None:
    assert compute_score("numina_aops_forum", text.replace("{}", expression), truth)["score"] == 1.0
    assert compute_score("numina_aops_forum", text.replace("{}", "19"), truth)["score"] == 0.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [(r"\boxed{7}, not $8$", 1.0), ("The answer is $7$.", 1.0), ("The answer is $7$." + " and" * 100, 0.0)],
)
def test_a_box_goes_before_the_last_expression_which_must_be_near_the_end(answer: str, score: float) -> None:
    assert compute_score("numina_aops_forum", answer, "7")["score"] == score


def test_a_box_without_braces_ends_at_the_dollar() -> None:
    assert math_rewards.last_boxed(r"so $\boxed 4 $, done") == math_rewards.last_boxed(r"\boxed{ 4 }") == "4"


@pytest.mark.parametrize(
    ("answer", "expression"),
    [
        ("First $1$, so the answer is $ x $, or $ x+1 $.", "x+1"),
        ("The sum is 3 and it equals 4.", "4"),
        ("It is 4", "4"),
        ("Answer: see the text above 12", "12"),
        ("The answer is .", None),
    ],
)
def test_the_last_expression_of_a_text(answer: str, expression: str | None) -> None:
    assert math_rewards.last_expression(answer) == expression


@pytest.mark.parametrize(
    ("answer", "number"),
    [("7 - 4 = 3", "3"), ("5-9", "9"), ("is -4", "-4"), ("-4", "-4"), ("= -12.50.", "-12.50"), ("1,234,567", "1234567"),
     ("x=+3", "3"), ("\u22125", "-5"), (".5", ".5"), ("none", None), ("", None), ("(3) -2", "-2"), ("3)-2", "2"),
     ("a1b22c", "22")],
)  # fmt: skip
def test_the_last_number_of_a_text(answer: str, number: str | None) -> None:
    assert text.last_number(answer) == number


@pytest.mark.parametrize(
    ("source", "answer", "truth", "score"),
    [
        ("rlsys/arithmetic", "3 + 4 = 7", "7", 1.0),
        ("rlsys/arithmetic", "7.0", 7, 1.0),
        ("rlsys/arithmetic", r"4, so \boxed{7} as 8 is too much", "7", 1.0),
        ("rlsys/arithmetic", "8", "7", 0.0),
        ("rlsys/arithmetic/two_digit", "seven", "7", 0.0),
        ("text/exact", " the  answer\n", "the answer", 1.0),
        ("text/exact", "The answer", "the answer", 0.0),
        ("text/regex", "code: AB12", r"code: ([A-Z]+\d+)", 1.0),
        ("text/regex", "nothing", r"code", 0.0),
        ("searchR1_nq", "<answer>The Paris.</answer>", {"target": ["London", "paris"]}, 1.0),
        ("searchR1_nq", "<answer>Rome</answer>", {"target": "paris"}, 0.0),
        ("searchR1_nq", "Paris", ["paris"], 0.0),
        ("numina_olympiads", "the result is $x+1$", "1+x", 1.0),
        ("lighteval/MATH", r"\boxed{3}", "3", 1.0),
        ("openai/gsm8k", "#### 3", "3", 1.0),
        ("aime2024", "Answer: 3", "3", 1.0),
    ],
)
def test_routing_by_data_source(source: str, answer: str, truth: Any, score: float) -> None:
    assert compute_score(source, answer, truth)["score"] == score


def test_every_route_leads_to_a_grader() -> None:
    for source in ROUTES:
        assert route(source.replace("*", "anything")) == ROUTES[source]


def test_an_unknown_data_source_says_what_to_do() -> None:
    with RewardPool(num_workers=1) as pool:
        result = pool.score([RewardItem("my/data", "1", "1")])[0]
    assert result.status == "error"
    assert "custom_reward_function.path" in result.message
    assert compute_score("my/data", "1", "1", unknown_score=0.0) == 0.0
    check_sources(["openai/gsm8k", "aime2025"])
    with pytest.raises(ConfigError, match=r"'my/data'.*reward\.custom_reward_function\.path"):
        check_sources(["openai/gsm8k", "my/data"])


def test_built_in_graders_in_the_pool_take_their_arguments() -> None:
    from rlsys.rewards.pool.pool import Grader

    with RewardPool(Grader(kwargs={"format_score": 0.25, "sandbox": {"memory_limit_mb": 256}}), num_workers=1) as pool:
        results = pool.score([RewardItem("openai/gsm8k", "#### 5", "6")])
    assert results[0].score == 0.25
    assert results[0].extra == {"acc": 0.0, "pred": "5"}
