"""Code of completions, run against the tests of code data sets."""

from __future__ import annotations

import json
import sys

import pytest

from yatt_jax.errors import InputError
from yatt_jax.rewards import RewardSpec, Scorer, build
from yatt_jax.rewards.code import find_code
from yatt_jax.rewards.code_tests import Calls, Statements, Streams, parse_tests, same_text

linux = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are for Linux")
LIMITS = {"cpu_s": 10.0, "wall_s": 20.0}


def scorer(**kwargs) -> Scorer:
    try:
        return build({"code": RewardSpec("yatt_jax.rewards.code:Code", kwargs={"limits": LIMITS, **kwargs})})
    except InputError as error:
        pytest.skip(str(error))


def test_forms_of_tests():
    assert parse_tests("assert f(1) == 2", "w") == Statements(("assert f(1) == 2",))
    assert parse_tests(["assert f(1)", "assert f(2)"], "w") == Statements(("assert f(1)", "assert f(2)"))
    human = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert parse_tests(human, "w", "inc") == Statements((human + "\ncheck(inc)\n",))
    assert parse_tests("[1, 2] == f()\n# no JSON", "w") == Statements(("[1, 2] == f()\n# no JSON",))
    apps = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4"]]}
    assert parse_tests(json.dumps(apps), "w") == Streams((("1\n", "2\n"), ("2\n3", "4")))
    assert parse_tests({"input": ["1"], "output": ["2"]}, "w") == Streams((("1", "2"),))
    calls = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    assert parse_tests(calls, "w") == Calls("add", (([1, 2], 3),))
    case = {"input": '[1, 2]\n"a"', "output": "3"}
    live = [{**case, "testtype": "stdin"}]
    assert parse_tests(live, "w") == Streams((('[1, 2]\n"a"', "3"),))
    functional = [{**case, "testtype": "functional"}]
    assert parse_tests(functional, "w", "f") == Calls("f", (([[1, 2], "a"], 3),))
    for bad in (None, "", [], {}, {"inputs": ["1"], "outputs": []}, [{"input": 1, "output": "2"}], [1], 7):
        with pytest.raises(InputError, match=r"^p:1: expected Python text, a list of texts"):
            parse_tests(bad, "p:1")
    with pytest.raises(InputError, match="functional tests need the name of the function"):
        parse_tests(functional, "p:1")
    with pytest.raises(InputError, match="are not JSON"):
        parse_tests([{"input": "[1", "output": "2", "testtype": "functional"}], "p:1", "f")


def test_outputs_are_compared_as_judges_do():
    assert same_text("1 2\n3  \n\n", "1 2\n3")
    assert same_text("0.3333333", "0.33333333")
    assert same_text("1  2\n", "1 2")
    assert not same_text("1 2", "1 2 3")
    assert not same_text("10000001", "10000000")
    assert not same_text("0.34", "0.33")
    assert not same_text("", "1")
    assert not same_text("yes", "Yes")


def test_code_in_completions():
    assert find_code("print(1)") == "print(1)"
    assert find_code("So:\n```python\nx = 1\n```\nand\n```\ntext\n```\n") == "x = 1\n"
    assert find_code("```\na\n```\n```py\nb\n```\n```python3\nc\n```") == "c\n"
    assert find_code("```\na\n```\n```\nb\n```") == "b\n"
    assert find_code("Sure!\n```python\nx = 1\ny = 2") == "x = 1\ny = 2"


@linux
def test_unit_tests(sample):
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]
    samples = [
        sample("```python\ndef add(a, b):\n    return a + b\n```", tests=tests),
        sample("def add(a, b):\n    return a * b", tests=tests),
        sample("def sub(a, b):\n    return a - b", tests=tests),
        sample("def add(a, b):\n    return a +", tests=tests),
        sample("import sys\ndef add(a, b):\n    return 3\nsys.exit(0)", tests=tests),
        sample("import os\nos._exit(0)", tests=tests),
        sample("def add(a, b):\n    print('right\\n' * 5)\n    return 1", tests=tests),
        sample("def add(a, b):\n    raise SystemExit", tests=tests),
    ]
    share = scorer(score="share")
    scores = share(samples)
    share.close()
    assert scores.total.tolist() == pytest.approx([1, 1 / 3, 0, 0, 0, 0, 0, 0])
    assert scores.counts["code/programs"] == 8
    whole = scorer()
    assert whole(samples[:3]).total.tolist() == [1, 0, 0]
    whole.close()


@linux
def test_standard_input_and_output(sample):
    tests = json.dumps({"inputs": ["3\n1 2 3\n", "1\n5\n", "2\n1 1\n"], "outputs": ["6\n", "5\n", "2\n"]})
    good = "n = int(input())\nprint(sum(map(int, input().split())))"
    first = "input()\nprint(6)"
    samples = [
        sample(good, tests=tests),
        sample(first, tests=tests),
        sample(good + "\nraise SystemExit(1)", tests=tests),
    ]
    for score, want in (("all", [1, 0, 0]), ("share", [1, 1 / 3, 0])):
        made = scorer(score=score)
        found = made(samples)
        made.close()
        assert found.total.tolist() == pytest.approx(want)
        assert found.counts["code/programs"] == {"all": 3 + 2 + 1, "share": 9}[score]
    few = scorer(most_tests=1)
    assert few(samples[:2]).total.tolist() == [1, 1]
    few.close()


@linux
def test_functions_and_methods(sample):
    tests = {"inputs": [[[2, 7], 9], [[3, 3], 6]], "outputs": [[0, 1], [[0, 1]]], "fn_name": "two"}
    body = "(self, n, t):\n        return (0, 1)"
    made = scorer()
    found = made(
        [sample(f"class Solution:\n    def two{body}", tests=tests), sample("def two(n, t): return 5", tests=tests)]
    )
    made.close()
    assert found.total.tolist() == [1, 0]


@linux
def test_what_goes_before_the_code(sample):
    tests = "def check(candidate):\n    assert candidate(2) == 4\n"
    made = scorer(before="stub", entry_point="entry")
    one = sample("    return n * n", tests=tests, stub="def square(n):", entry="square")
    assert made([one]).total.tolist() == [1]
    with pytest.raises(InputError, match=r"p\.jsonl:2: the reward needs the field 'stub'.*\['entry', 'tests'\]"):
        made([sample("", tests=tests, entry="x")])
    with pytest.raises(InputError, match=r'p\.jsonl:3: field "tests": expected Python text'):
        made([sample("", tests=7, stub="", entry="x")])
    made.close()


@linux
def test_limits_are_counted_and_score_nothing(sample):
    made = scorer(limits={"cpu_s": 5.0, "wall_s": 1.0, "memory_mb": 200.0}, score="share")
    tests = ["assert f(1)", "assert f(2)"]
    hangs = "def f(x):\n    while x == 2: pass\n    return True"
    eats = "x = 'a'\ndef f(n):\n    return len(bytearray(10**9))"
    scores = made([sample(hangs, tests=tests), sample(eats, tests=tests)])
    made.close()
    assert scores.total.tolist() == [0.5, 0.0]  # the test before the one that hangs has passed
    assert scores.counts["code/ended_time"] == 1


def test_settings():
    with pytest.raises(InputError, match=r"kwargs\.limits: wall_s = -1\.0: must be above 0"):
        build({"code": RewardSpec("yatt_jax.rewards.code:Code", kwargs={"limits": {"wall_s": -1}})})
    with pytest.raises(InputError, match="parallel = 0 and most_tests = 0"):
        build({"code": RewardSpec("yatt_jax.rewards.code:Code", kwargs={"parallel": 0})})
