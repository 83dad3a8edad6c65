"""The rules of the workspace as functions of a tree, so that the tests can also run them on planted violations.

Every function takes the root of a workspace and returns the violations that it finds, one line each.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PORTIONS: dict[str, str] = {
    "types": "types",
    "sde": "sde",
    "models": "models",
    "rollout": "rollout",
    "reward": "reward",
    **dict.fromkeys(
        ("train", "algorithms", "data", "distributed", "trainer", "config", "tracking", "rehearsal"), "train"
    ),
    **dict.fromkeys(
        ("app", "datasets", "recipes", "suites", "worlds", "pretraining", "reward_server", "viewer", "skeletons"),
        "apps",
    ),
    **dict.fromkeys(("train_diffusion", "train_vlm", "train_pe", "train_unified_model"), "apps"),
}
"""First name below `unirl` -> the package, or "apps", that ships it."""

ARROWS: dict[str, frozenset[str]] = {
    "types": frozenset(),
    "sde": frozenset(),
    "models": frozenset({"types", "sde"}),
    "rollout": frozenset({"types", "sde"}),
    "train": frozenset({"types", "sde"}),
    "reward": frozenset({"types"}),
    "apps": frozenset({"types", "sde", "models", "rollout", "train", "reward"}),
}
"""What each may import besides itself."""

INNER_ARROWS: dict[str, frozenset[str]] = {"algorithms": frozenset({"types", "sde"})}
"""Portion inside a package -> what it may import besides itself, where that is less than the package may."""

HIDDEN: dict[str, tuple[str, ...]] = {
    "unirl.distributed.worker": tuple(f"unirl.distributed.{name}" for name in ("runtime", "group", "weight_sync")),
    "unirl.distributed.held": ("unirl.distributed.runtime",),
    "unirl.distributed.group.ray_worker": ("unirl.distributed.weight_sync", "unirl.distributed.tensor.planes"),
}
"""Module -> modules and packages beside it that it must not import: what is above it. A worker opens what it is handed
(`Openable`) and knows neither pushes nor data planes."""

HOMES: dict[str, tuple[str, ...]] = {
    "ray": ("unirl.distributed", "unirl.reward_server.ray_replica"),  # a reward node has no unirl.distributed
    "hydra": ("unirl.config", "apps"),
    "omegaconf": ("unirl.config", "apps"),
}
"""Third-party package -> the only places that import it; "apps" stands for the portions of the apps."""

UNPICKLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Unpickler", "FileSystemReader"), ("unirl.train.backend.state_reader",)),
    # The second: between a run and the processes that play its environments.
    "pickle": ("unirl.train.backend.state_reader", "unirl.rollout.environments.wire"),
    # Between the ranks of one run, which execute each other's functions anyway.
    **dict.fromkeys(("broadcast_object_list", "all_gather_object"), ("unirl.train.checkpoint.ranks",)),
    **dict.fromkeys(("_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"), ()),
    **dict.fromkeys(("multiprocessing.managers", "multiprocessing.connection.Listener"), ()),
    **dict.fromkeys(("gather_object", "scatter_object_list", "recv_object_list", "read_pickle"), ()),
}
"""What turns bytes into objects that may act -> the only modules with it, each for a reason that its docstring gives.
Ray pickles too; its homes are above."""


DEVICES = re.compile(r"(?<![\w-])(cuda|npu|xpu|mps)(?![\w-])|CUDA_VISIBLE_DEVICES")
"""Names of kinds of devices in strings; in code, the attributes that torch has for one kind alone."""
DEVICE_ATTRIBUTES = frozenset({"cuda", "npu", "xpu", "mps", "is_cuda", "is_npu", "is_xpu", "is_mps"})
DEVICE_HOME = "unirl.types.device_kinds"


@dataclass(frozen=True)
class Module:
    """One source file of a workspace package."""

    path: Path
    name: str
    """Dotted, e.g. unirl.sde.kernels."""
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """All of the tree."""

    @property
    def portion(self) -> str:
        """First name below unirl."""
        return self.name.split(".")[1]


def members(root: Path) -> list[Path]:
    """Folders of the workspace's packages and apps."""
    return sorted(path.parent for pattern in ("packages", "apps") for path in root.glob(f"{pattern}/*/pyproject.toml"))


def modules(root: Path) -> Iterator[Module]:
    """Every module below a src/unirl folder."""
    for member in members(root):
        for path in sorted((member / "src" / "unirl").rglob("*.py")):
            parts = path.relative_to(member / "src").with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if name != "unirl":
                yield Module(path, name, *parsed(path, path.read_text(encoding="utf-8")))


@functools.cache
def parsed(path: Path, text: str) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    """The tree of a file and all its nodes: each rule looks at every file again."""
    tree = ast.parse(text, filename=str(path))
    return tree, tuple(ast.walk(tree))


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions and literal import_module calls included."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if (
                name in ("import_module", "__import__")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                yield node.lineno, first.value


def unpickling(root: Path) -> list[str]:
    """Places where bytes from a file or a wire could become objects that act; see UNPICKLES."""
    found = []
    for module in modules(root):
        where = module.path.relative_to(root)
        for line, name in imported_names(module):
            parts = name.split(".")
            for banned, homes in UNPICKLES.items():
                is_it = parts[: banned.count(".") + 1] == banned.split(".") or parts[-1] == banned
                if is_it and module.name not in homes:
                    found.append(f"{where}:{line}: {name} unpickles; keep data as JSON or safetensors")
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and module.name not in UNPICKLES.get(node.attr, (module.name,)):
                found.append(f"{where}:{node.lineno}: {node.attr} unpickles; keep data as JSON or safetensors")
            if isinstance(node, ast.Call) and (reason := _unpickling_call(node)):
                found.append(f"{where}:{node.lineno}: {reason}")
    return sorted(set(found))


def named_devices(root: Path) -> list[str]:
    """Code that names a kind of device, outside the one module that knows them; docstrings may."""
    found = []
    for path in sorted(_device_code(root)):
        tree, nodes = parsed(path, path.read_text(encoding="utf-8"))
        texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
            if (is_text and DEVICES.search(str(node.value))) or (
                isinstance(node, ast.Attribute) and node.attr in DEVICE_ATTRIBUTES
            ):
                found.append(
                    f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)[:60]} names a kind of device; ask "
                    f"{DEVICE_HOME} or unirl.types.devices"
                )
    return found


def _device_code(root: Path) -> Iterator[Path]:
    """Modules, and the scripts that measure."""
    yield from (module.path for module in modules(root) if module.name != DEVICE_HOME)
    yield from root.glob("apps/*/bench/*.py")


def _unpickling_call(node: ast.Call) -> str | None:
    called = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called in ("torch.load", "jit.load", "torch.jit.load", "hub.load", "torch.hub.load") and (
        called != "torch.load" or given.get("weights_only") != "True"
    ):
        return f"{called} unpickles; only torch.load(..., weights_only=True) does not"
    if given.get("allow_pickle", "False") != "False":
        return f"{called} with allow_pickle unpickles"
    if called.endswith(".recv") and not node.args and not node.keywords:
        return f"{called}() of a multiprocessing connection unpickles; take recv_bytes"
    return None


def stops_after_errors(root: Path) -> list[str]:
    """Messages that put a full stop behind the text of a caught error, which may end with its own."""
    found = []
    for module in modules(root):
        for handler in module.nodes:
            if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
                continue
            for text in ast.walk(handler):
                parts = text.values if isinstance(text, ast.JoinedStr) else []
                for part, behind in itertools.pairwise(parts):
                    if (
                        isinstance(part, ast.FormattedValue)
                        and ast.unparse(part.value) in (handler.name, f"str({handler.name})")
                        and isinstance(behind, ast.Constant)
                        and str(behind.value).startswith(".")
                    ):
                        where = f"{module.path.relative_to(root)}:{part.lineno}"
                        found.append(
                            f"{where}: {handler.name} may end with a full stop; write as_sentence({handler.name})"
                        )
    return found


def stray_namespace_files(root: Path) -> list[str]:
    """A unirl/__init__.py hides every sibling package."""
    return [
        f"{path.relative_to(root)}: delete it; unirl is a namespace shared by several packages"
        for member in members(root)
        for path in member.rglob("unirl/__init__.py")
        if ".venv" not in path.parts
    ]


def wrong_arrows(root: Path) -> list[str]:
    """Imports of a unirl package that the importing one may not know."""
    found = []
    for module in modules(root):
        own = PORTIONS.get(module.portion)
        if own is None:
            found.append(f"{module.path.relative_to(root)}: {module.name} belongs to no known portion of unirl")
            continue
        for line, name in imported_names(module):
            parts = name.split(".")
            if parts[0] != "unirl" or len(parts) < 2:
                continue
            other = PORTIONS.get(parts[1])
            if other is None:
                found.append(f"{module.path.relative_to(root)}:{line}: imports {name}, which no package ships")
            elif other != own and other not in ARROWS[own]:
                found.append(f"{module.path.relative_to(root)}:{line}: {own} imports {name} of {other}")
            elif parts[1] not in INNER_ARROWS.get(module.portion, {parts[1]}) | {module.portion}:
                found.append(f"{module.path.relative_to(root)}:{line}: {module.portion} imports {name} of {parts[1]}")
    return sorted(set(found))


MOST_LINES = {"class": 300, "function": 100}
"""Of a definition, its docstring included."""


def oversized(root: Path) -> list[str]:
    """Classes and functions that have too many lines to be read at once."""
    found = []
    for module in modules(root):
        for node in module.nodes:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES[kind]:
                place = f"{module.path.relative_to(root)}:{node.lineno}"
                found.append(f"{place}: the {kind} {node.name} has {lines} lines, at most {MOST_LINES[kind]}")
    return found


def hidden_imports(root: Path) -> list[str]:
    """Imports of a module that the importing one must not know; see HIDDEN."""
    return sorted(
        {
            f"{module.path.relative_to(root)}:{line}: {module.name} imports {name}, which is above it"
            for module in modules(root)
            for line, name in imported_names(module)
            for above in HIDDEN.get(module.name, ())
            if name == above or name.startswith(f"{above}.")
        }
    )


def stray_frameworks(root: Path) -> list[str]:
    """Imports of ray, hydra and omegaconf outside their homes."""
    found = []
    for module in modules(root):
        for line, name in imported_names(module):
            homes = HOMES.get(name.split(".")[0])
            if homes is None:
                continue
            is_app = PORTIONS.get(module.portion) == "apps" and "apps" in homes
            if not is_app and not any(module.name == home or module.name.startswith(home + ".") for home in homes):
                found.append(f"{module.path.relative_to(root)}:{line}: imports {name}; only {' and '.join(homes)} may")
    return sorted(set(found))


_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


def environment_reads(root: Path) -> list[str]:
    """Uses of the environment in libraries: os.environ, os.getenv, and the same names imported from os."""
    found = []
    for module in modules(root):
        if PORTIONS.get(module.portion) == "apps":
            continue
        aliases = {
            alias.asname or alias.name
            for node in module.nodes
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "os"
        }
        for node in module.nodes:
            is_attribute = (
                isinstance(node, ast.Attribute)
                and node.attr in _ENVIRONMENT
                and isinstance(node.value, ast.Name)
                and node.value.id in aliases
            )
            is_import = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in _ENVIRONMENT | {"*"} for alias in node.names)
            )
            if is_attribute or is_import:
                where = f"{module.path.relative_to(root)}:{node.lineno}"
                found.append(f"{where}: reads the environment; take an argument, only apps read environment variables")
    return found


def missing_package_files(root: Path) -> list[str]:
    """README.md and CHANGELOG.md with text, py.typed in every portion, and a tests folder with a test."""
    found = []
    for member in members(root):
        where = member.relative_to(root)
        for name in ("README.md", "CHANGELOG.md"):
            path = member / name
            if not path.is_file() or len(path.read_text(encoding="utf-8").strip()) < 40:
                found.append(f"{where}/{name}: missing or empty")
        portions = [path for path in sorted((member / "src" / "unirl").glob("*")) if (path / "__init__.py").is_file()]
        found += [
            f"{path.relative_to(root)}/py.typed: missing" for path in portions if not (path / "py.typed").is_file()
        ]
        if not portions:
            found.append(f"{where}/src/unirl: holds no package")
        if not list((member / "tests").rglob("test_*.py")):
            found.append(f"{where}/tests: holds no test")
    return found


_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*(?P<bounds>[^;]*)")
_CLAUSE = re.compile(r"(?P<operator>>=|<=|==|!=|~=|<|>)\s*(?P<version>[0-9][0-9.]*)$")


def _release(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (4 - len(numbers)))


def _contains(bounds: str, version: str) -> bool:
    for clause in filter(None, (part.strip() for part in bounds.split(","))):
        match = _CLAUSE.match(clause)
        if match is None:
            return False
        left, right = _release(version), _release(match["version"])
        holds = {">=": left >= right, "<=": left <= right, "==": left == right, "!=": left != right}
        holds |= {"<": left < right, ">": left > right, "~=": left >= right}
        if not holds[match["operator"]]:
            return False
    return True


def wrong_bounds(root: Path) -> list[str]:
    """Requirements on workspace members without a lower and an upper bound, or that exclude the member's version."""
    projects = {path: tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8")) for path in members(root)}
    versions = {data["project"]["name"]: data["project"]["version"] for data in projects.values()}
    found = []
    for path, data in projects.items():
        project = data["project"]
        extras = project.get("optional-dependencies", {})
        required = [(item, True) for item in project.get("dependencies", [])]
        # an extra that only forwards to a sibling's extra inherits the bounds of the main dependency
        required += [(item, False) for items in extras.values() for item in items]
        for requirement, needs_bounds in required:
            match = _REQUIREMENT.match(requirement)
            if match is None or match["name"] not in versions:
                continue
            name, bounds, version = match["name"], match["bounds"].strip(), versions[match["name"]]
            where = f"{(path / 'pyproject.toml').relative_to(root)}: {requirement}"
            if needs_bounds and not (">=" in bounds and "<" in bounds.replace("<=", "")):
                found.append(f"{where}: needs a lower and an upper bound")
            if not _contains(bounds, version):
                found.append(f"{where}: excludes {name} {version}, the version in this workspace")
    return found


def undeclared_imports(root: Path) -> list[str]:
    """Imports of a unirl package that the importing package does not require."""
    required: dict[Path, set[str]] = {}
    for member in members(root):
        project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        matches = [_REQUIREMENT.match(item) for item in project.get("dependencies", [])]
        required[member] = {match["name"] for match in matches if match}
    found = []
    for module in modules(root):
        (member,) = (path for path in required if path in module.path.parents)
        for line, name in imported_names(module):
            parts = name.split(".")
            other = PORTIONS.get(parts[1]) if parts[0] == "unirl" and len(parts) > 1 else None
            if other in (None, "apps", PORTIONS.get(module.portion)) or f"unirl-{other}" in required[member]:
                continue
            found.append(f"{module.path.relative_to(root)}:{line}: imports {name}; require unirl-{other}")
    return sorted(set(found))


def missing_conflicts(root: Path, extras: frozenset[str]) -> list[str]:
    """Pairs of extras that [tool.uv] does not declare as conflicting."""
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [
        {item.get("extra") for item in group} for group in data.get("tool", {}).get("uv", {}).get("conflicts", [])
    ]
    pairs = sorted((a, b) for a in extras for b in extras if a < b)
    return [
        f"extras {a} and {b} are not declared conflicting" for a, b in pairs if not any({a, b} <= g for g in groups)
    ]


# Joined here so that this file does not hold the patterns that it looks for.
_MACHINE_FOLDERS = ("work", "root", "home", "Users")
_MACHINE_PATH = re.compile(r"(?:(?<=file://)|(?<![\w.\-/}>]))/(?:" + "|".join(_MACHINE_FOLDERS) + r")/[\w.\-]")


def machine_paths(root: Path, files: Iterable[str]) -> list[str]:
    """Lines with an absolute path into somebody's home or work folder."""
    found = []
    for name in files:
        path = root / name
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), start=1):
            if match := _MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line[match.start() : match.start() + 60]}")
    return found
