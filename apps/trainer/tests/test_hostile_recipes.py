"""`show` and `check` read a recipe of anyone without executing anything that it names."""

import sys
from pathlib import Path

import pytest

from unirl.app.main import USER_ERROR, main
from unirl.config.signatures import read_module, read_target
from unirl.types.errors import ConfigError

TOUCH = "from pathlib import Path\nPath({mark!r}).touch()\n"


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that hostile code would make; modules that make it when they are imported lie on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mark = tmp_path / "executed"
    body = (
        TOUCH.format(mark=str(mark))
        + "class Scorer:\n    def __init__(self, **options): ...\n    recipe_rules = 'evil_rules'\n"
        + "def reward(a, b, c): ...\nRULES = ()\n"
    )
    for module in ("evil.py", "evil_rules.py"):
        (tmp_path / module).write_text(body)
    (tmp_path / "unirl").mkdir()
    (tmp_path / "unirl" / "evil.py").write_text(body)
    for package in ("evil_package", "hydra_plugins/evil_plugin"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(body)
    (tmp_path / "evil_package" / "inner.py").write_text(body)
    yield mark
    read_target.cache_clear()
    read_module.cache_clear()


SHAPES = "defaults: [/worlds/shapes/nft, _self_]\n"
HOSTILE = {
    "a scorer's module": SHAPES + "reward: {scorers: {mine: {_target_: evil.Scorer}}}",
    "a package on the way": SHAPES + "reward: {scorers: {mine: {_target_: evil_package.inner.Scorer, a: 1}}}",
    "a reward function": SHAPES
    + "reward: {scorers: {mine: {_target_: unirl.reward.function.FunctionRewardScorer, function: evil.reward}}}",
    "a callable of the interpreter": SHAPES
    + "reward: {scorers: {mine: {_target_: os.system, command: touch executed}}}",
    "builtins": SHAPES + "data: {_target_: builtins.exec, path: \"open('executed', 'w')\"}",
    "the running program": SHAPES + "data: {_target_: __main__.anything}",
    "a tracker": SHAPES + "trackers: {mine: {_target_: evil.Scorer}}",
    "an evaluation": SHAPES + "eval: {_target_: evil.Scorer}",
    "a trainer": SHAPES + "trainer: {_target_: evil.Scorer}",
    "a YAML object": SHAPES + "recipe: !!python/object/apply:os.system [touch executed]",
    "a YAML name": SHAPES + "recipe: !!python/name:evil.Scorer",
    "a YAML module": SHAPES + "recipe: !!python/module:evil",
    "a resolver that is not there": SHAPES + "recipe: ${eval:open('executed','w')}",
    "a resolver that builds": SHAPES + "recipe: ${oc.create:evil.Scorer}",
    "a search path": "hydra: {searchpath: ['pkg://evil_package', 'file://.']}\n" + SHAPES,
    "a plugin's launcher": "defaults: [/worlds/shapes/nft, {override hydra/launcher: evil}, _self_]",
    "a default of a package": "defaults: ['pkg://evil_package/inner', _self_]",
    "a default outside": "defaults: [../../../../etc/passwd, _self_]",
}


@pytest.mark.parametrize("verb", ["show", "check"])
@pytest.mark.parametrize("what", HOSTILE)
def test_reading_a_recipe_executes_nothing(mark, verb, what, capsys):
    path = Path("hostile.yaml")
    path.write_text(HOSTILE[what])
    arguments = [verb, str(path), *(["--resolve"] if verb == "show" else [])]
    assert main(arguments) in (0, USER_ERROR)
    assert not mark.exists()
    assert not [name for name in sys.modules if name.startswith("evil")]
    assert "Traceback" not in capsys.readouterr().err


def test_rules_of_a_class_beside_the_recipe_are_read_with_values_alone(mark, capsys):
    Path("own.yaml").write_text(SHAPES + "advantages: {_target_: evil.Scorer}")
    assert main(["check", "own.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "the rules of evil_rules were left out" in shown and not mark.exists()
    assert "uv run trainer check --values own.yaml" in shown
    main(["check", "own.yaml", "--values"])
    assert mark.exists() and "left out" not in capsys.readouterr().out
    for name in ("evil", "evil_rules"):
        sys.modules.pop(name, None)


@pytest.fixture
def run_of_somebody(mark):
    """Makes the folder of a run by its recipe."""

    def make(recipe):
        folder = Path("somebodys_run")
        (folder / "checkpoints" / "step-000001").mkdir(parents=True)
        (folder / "config.yaml").write_text(recipe)
        return str(folder)

    return make


FOREIGN = {
    "eval._target_ = evil.Scorer": "eval: {_target_: evil.Scorer}",
    "trackers.mine._target_ = unirl.evil.Scorer": "trackers: {mine: {_target_: unirl.evil.Scorer}}",
    "reward.scorers.mine.function = evil.reward": "reward: {scorers: {mine: {_target_: "
    "unirl.reward.function.FunctionRewardScorer, function: evil.reward}}}",
    "engine.python = somebodys_run/python": "engine: {python: somebodys_run/python}",
}


@pytest.mark.parametrize("named", FOREIGN)
def test_code_in_the_recipe_of_a_run_is_run_with_trust_alone(run_of_somebody, mark, capsys, monkeypatch, named):
    kind = "sglang" if "python" in named else "nft"
    run = run_of_somebody(f"defaults: [/worlds/shapes/{kind}, _self_]\n{FOREIGN[named]}")
    for words in (["eval", run], ["export", run, "--to", "out", "--merged"], [run, "resume=auto"]):
        assert main(words) == USER_ERROR
        said = capsys.readouterr().err
        if words[0] == "export" and named.startswith(("reward.scorers", "trackers")):
            assert "manifest.json" in said  # an export leaves them out: it gets as far as the empty checkpoint
            continue
        assert f"that does not come with UniRL: {named}. Nothing of it was run." in said and "add --trust" in said
    assert main(["check", run]) in (0, USER_ERROR)
    assert not mark.exists() and not [name for name in sys.modules if "evil" in name]
    monkeypatch.setattr(
        "unirl.app.recipe.check_recipe", lambda *_, **__: (_ for _ in ()).throw(ConfigError("was read"))
    )
    for words in (["eval", run, "--trust"], [run, "resume=auto", "--trust"]):
        main(words)
        assert "was read" in capsys.readouterr().err


def test_the_check_lists_code_that_does_not_come_with_unirl(mark, capsys):
    Path("own.yaml").write_text(SHAPES + "trackers: {mine: {_target_: evil.Scorer}}")
    assert main(["check", "own.yaml"]) == 0
    assert (
        "  runs code that does not come with UniRL: trackers.mine._target_ = evil.Scorer\n" in capsys.readouterr().out
    )
    assert main(["check", "worlds/shapes/sglang"]) == 0
    assert "does not come with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "data._target_=subprocess.check_output",
            "data._target_ = subprocess.check_output is of Python's own",
        ),
        ("data._target_=builtins.exec", "data._target_ = builtins.exec is of Python's own"),
        ("backend.optimizer._target_=os.system", "backend.optimizer._target_ = os.system is of Python's own"),
        ("data._target_=evil.reward", "data._target_ = evil.reward is a function that does not say which class"),
        ("+trackers.x._target_=evil.reward", "trackers.x._target_ = evil.reward is a function that does not say"),
    ],
)
def test_a_target_that_can_be_no_part_of_a_run_is_refused(mark, capsys, change, message):
    assert main(["check", change]) == USER_ERROR
    assert message in capsys.readouterr().err and not mark.exists()


NINE = ",".join(["{}"] * 9)
ALIASES = "".join(f"x{i}: &x{i} [{NINE.format(*[f'*x{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"x0: &x0 [{NINE.format(*'x' * 9)}]\n{ALIASES}",
            "holds more than 100000 values when its aliases are written out",
        ),
        ("x: " + "[" * 5000 + "]" * 5000, "nests deeper than 100 levels"),
        ("# " + "x" * 2**24, "a recipe has at most 16777216"),
    ],
    ids=["aliases", "nesting", "size"],
)
def test_a_small_file_that_becomes_large_is_refused_at_once(mark, capsys, text, message):
    Path("bomb.yaml").write_text(f"{SHAPES}{text}\n")
    assert main(["check", "bomb.yaml"]) == USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("change", ["reward.scorers.mine={_target_:evil.Scorer}", "data._target_=evil.Scorer"])
def test_changes_of_the_command_line_execute_nothing_either(mark, change):
    assert main(["show", change]) == 0
    assert main(["check", change]) in (0, USER_ERROR)
    assert not mark.exists()


def test_values_does_import_what_a_recipe_names_and_its_help_says_so(mark, capsys):
    Path("hostile.yaml").write_text(SHAPES + "pipeline: {schedule: {_target_: evil.Scorer}}")
    main(["check", "hostile.yaml", "--values"])
    assert mark.exists()
    sys.modules.pop("evil", None)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "not for a file you do not trust" in " ".join(capsys.readouterr().out.split())
