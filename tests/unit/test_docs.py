"""Everything that the documentation names exists: files, modules, flags, settings, verbs, metrics, messages, links."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from flows.config import RunConfig
from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rollout.config import RolloutConfig
from resources.rollout.gate_counters import batch_counters, gauges
from resources.rollout.messages import Batch
from resources.rollout.staleness import StalenessGate
from tasks.rollout.batch_metrics import batch_metrics
from tasks.training.algorithm_config import AdvantageConfig, CorrectionConfig, CriticConfig, KLConfig
from tasks.training.config import LossConfig
from tests.unit.test_tasks_training_learner import make_batch, make_learner
from tests.unit.test_tasks_training_model import make_model_directory

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md"), ROOT / "deployments/README.md"]
)
ROOMS = ("flows", "tasks", "resources", "deployments", "docs", "examples", "tests", "benchmarks", ".ci")
COMMAND_SOURCES = {
    "flows.train": "flows/command_line.py",
    "resources.pools.local_stack": "resources/pools/stack_command.py",
    "resources.pools.standing": "resources/pools/standing.py",
}
"""Where a module's command line is defined, for `python -m`."""
STAGE_FILES = (
    "flows/iteration.py",
    "tasks/rollout/stage.py",
    "tasks/training/owner.py",
    "tasks/training/learner.py",
    "tasks/training/rank.py",
    "tasks/weights/stage.py",
    "tasks/record/stage.py",
)
FAMILIES = ("maze", "sums")

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def code_spans(path: Path) -> list[str]:
    """Inline code of a page; fenced blocks are left out."""
    prose = re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    return [span.strip() for span in re.findall(r"`([^`\n]+)`", prose)]


def commands(path: Path) -> Iterator[str]:
    """Every code span, and every line of a code block."""
    yield from code_spans(path)
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text_of(path), flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4,}(\S.*)$", text_of(path), flags=re.MULTILINE)
    for line in [*indented, *(line for block in fenced for line in block.splitlines())]:
        yield line.strip()


@cache
def files_of_rooms() -> list[str]:
    return [str(file) for room in ROOMS for file in (ROOT / room).rglob("*.*")]


@cache
def sources() -> str:
    """All Python of the rooms in one text, with implicitly joined string literals joined."""
    files = [file for room in ("flows", "tasks", "resources") for file in sorted((ROOT / room).rglob("*.py"))]
    return re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(file.read_text() for file in files))


@cache
def everything_that_runs() -> str:
    others = [ROOT / "Makefile", ROOT / "prefect.yaml", *(f for f in (ROOT / "deployments").rglob("*") if f.is_file())]
    return sources() + "\n".join(file.read_text() for file in others if file.suffix != ".md")


@page
def test_paths_exist(path: Path) -> None:
    for span in code_spans(path):
        if re.fullmatch(r"[\w.][\w./-]*", span) and (span.split("/")[0] in ROOMS or span.endswith((".py", ".yaml"))):
            if "/" not in span and not span.endswith((".py", ".yaml")):
                continue  # a bare word such as `tasks`
            places = (ROOT / span, path.parent / span, ROOT / "resources" / span)
            exists = any(place.exists() for place in places) or any(
                file.endswith(f"/{span}") for file in files_of_rooms()
            )
            # A page may say what there is not ("there is no `utils.py`").
            assert exists or span == "utils.py", f"{path.name}: {span}"


@page
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", text_of(linked), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{path.name}: {target}; {linked.name} has {sorted(slugs)}"


@page
def test_modules_and_their_flags_exist(path: Path) -> None:
    for command in commands(path):
        match = re.search(r"python -m ([\w.]+)(.*)", command)
        if match is None or not match[1].startswith(("flows", "tasks", "resources", "benchmarks")):
            continue
        module = match[1]
        assert importlib.util.find_spec(module) is not None, f"{path.name}: {command}"
        known = text_of(ROOT / COMMAND_SOURCES.get(module, f"{module.replace('.', '/')}.py"))
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", match[2]):
            assert f'"{flag}"' in known, f"{path.name}: {module} has no {flag}"


@page
def test_verbs_of_make_and_what_they_pass_on_exist(path: Path) -> None:
    verbs = set(re.findall(r"^([a-z]+):.*##", text_of(ROOT / "Makefile"), flags=re.MULTILINE))
    for command in commands(path):
        for verb, rest in re.findall(r"(?:^|\s)make ([a-z]+)\b([^#]*)", command):
            assert verb in verbs, f"{path.name}: make {verb}; verbs are {sorted(verbs)}"
            if name := re.search(r"NAME=([a-z_]+)", rest):
                assert (ROOT / "benchmarks" / f"{name[1]}.py").exists(), f"{path.name}: {command}"
            if verb == "up":
                for flag in re.findall(r"--[a-z][a-z-]*", rest):
                    assert f'"{flag}"' in text_of(ROOT / COMMAND_SOURCES["resources.pools.local_stack"]), command


def setting_exists(dotted: str) -> bool:
    """Whether a dotted key (``pools.classes.<name>.num_workers``) is a field of `RunConfig`."""
    place: Any = RunConfig
    for part in dotted.split("."):
        if isinstance(place, type) and issubclass(place, BaseModel):
            if part not in place.model_fields:
                return False
            place = place.model_fields[part].annotation
        elif get_origin(place) is dict:
            place = get_args(place)[1]
        else:
            return False
        options = [option for option in get_args(place) if option is not type(None)]
        if get_origin(place) is not dict and len(options) == 1 and isinstance(options[0], type):
            place = options[0]  # `X | None`
    return True


@page
def test_configuration_keys_exist(path: Path) -> None:
    sections = [name for name, field in RunConfig.model_fields.items() if field.annotation not in (str, int, float)]
    key = re.compile(rf"({'|'.join(sections)})(\.(\w+|<\w+>))+")
    for span in code_spans(path):
        if key.fullmatch(span):
            assert setting_exists(span), f"{path.name}: {span} is no setting"
    for command in commands(path):
        for setting in re.findall(r"--set ([\w.]+)=", command) + re.findall(r'"([\w]+\.[\w.]+)":', command):
            assert setting_exists(setting) or setting == "seed", f"{path.name}: {setting} is no setting"


def test_the_check_of_keys_knows_right_from_wrong() -> None:
    for dotted in ("training.optimizer.learning_rate", "pools.classes.<name>.num_workers", "warm_start.num_steps"):
        assert setting_exists(dotted), dotted
    for dotted in ("training.learning_rate", "rollout.max_stalenes", "pools.classes.<name>.workers", "seed.x"):
        assert not setting_exists(dotted), dotted


@page
def test_run_files_in_pages_are_read(path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", text_of(path), flags=re.DOTALL | re.MULTILINE):
        data = yaml.safe_load(block)
        for name, family in data.get("families", {}).items():
            assert FamilyConfig.model_validate(family), name
        RunConfig.model_validate({key: value for key, value in data.items() if key != "families"})


@page
def test_deployments_and_flows_exist(path: Path) -> None:
    known = set()
    for deployment in yaml.safe_load(text_of(ROOT / "prefect.yaml"))["deployments"]:
        module, _, function = deployment["entrypoint"].rpartition(".")
        source = text_of(ROOT / f"{module.replace('.', '/')}.py")
        flow = re.search(rf'flow\(name="([^"]+)"[^\n]*\)\ndef {function}\(', source)
        assert flow is not None, deployment["entrypoint"]
        known.add(f"{flow[1]}/{deployment['name']}")
    for command in commands(path):
        for name in re.findall(r"deployment run '?([\w/-]+)", command):
            assert name in known, f"{path.name}: {name}; deployments are {sorted(known)}"


@page
def test_environment_variables_are_used(path: Path) -> None:
    for span in code_spans(path):
        if match := re.fullmatch(r"\$?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(=\S+)?", span):
            name = match[1]
            assert name in everything_that_runs() or name == "CUDA_VISIBLE_DEVICES", f"{path.name}: {name}"


@page
def test_names_of_classes_exist(path: Path) -> None:
    ours = sources()
    for span in code_spans(path):
        if re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}(?:\.\w+)?", span):
            name, _, attribute = span.partition(".")
            assert re.search(rf"\b{name}\b", ours), f"{path.name}: {span}"
            assert not attribute or re.search(rf"\b{attribute}\b", ours), f"{path.name}: {span}"


def test_quoted_messages_are_what_the_code_says() -> None:
    path = ROOT / "docs/operations.md"
    start, end = (text_of(path).index(title) for title in ("## Bad input", "## Interruption"))
    cells = re.findall(r"^\| (`.*?`) \|", text_of(path)[start:end], flags=re.MULTILINE)
    fragments = [part.strip() for cell in cells for span in re.findall(r"`([^`]+)`", cell) for part in span.split("…")]
    assert len(fragments) > 25
    for fragment in fragments:
        # pydantic's own words for an unknown key
        assert fragment in sources() or fragment == "Extra inputs are not permitted", fragment


# -- metrics -----------------------------------------------------------------------------------------------------------


def documented_metrics() -> list[str]:
    glossary = text_of(ROOT / "docs/glossary.md")
    tables = glossary[glossary.index("## Metrics of an iteration") :]
    cells = re.findall(r"^\| (`[^|]*`) \|", tables, flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def pattern_of(documented: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", documented)
    return re.compile(r"[^/.]+".join(map(re.escape, parts)))


def gate_metrics() -> set[str]:
    """Every counter that the gate can write, through the functions that make a row of them."""
    values = {"termination": "evicted_stale", "failure": FailureClass.ENGINE, "horizon - oldest": "2"}
    values["done.num_turns"] = "3"
    names = []
    for file in ("staleness", "group_book", "gate_counters"):
        source = text_of(ROOT / f"resources/rollout/{file}.py")
        names += re.findall(r'counts\["([\w.]+)"\]', source)
        names += re.findall(r'"(dropped_\w+)"', source)
        for template in re.findall(r'counts\[f"([^"]+)"\]', source):
            names.append(re.sub(r"\{([^}]+)\}", lambda field: str(values[field[1]]), template))
    maze = FamilyConfig(environment="calculator", hardware_class="compute", num_prompts=3)
    gate = StalenessGate("run", {"maze": maze}, RolloutConfig(share_window=2, curriculum="informative_prompts"))
    family = gate.families["maze"]
    family.counts.update(names)
    counted = batch_counters(family, 3, {}, cross_policy=True) | {"num_turns": 4, "num_sampled_tokens": 9}
    figures = {f"{figure}/maze": value for figure, value in counted.items()} | gauges(gate)
    return set(batch_metrics(Batch("run", 3, (), figures))) | {"success/maze"}


@pytest.fixture(scope="module")
def learner_metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What updates measure: of several losses, with corrections and a critic, a skipped one and one with older tokens
    included."""
    directory = make_model_directory(tmp_path_factory.mktemp("model"))
    names: set[str] = set()
    for loss in ("ppo_clip", "decoupled"):
        learner = make_learner(directory, loss=LossConfig(name=loss))
        names |= set(learner.update(make_batch(0), 0).metrics)
        rows = make_batch(1)
        older = make_batch(1, sampled_under=0)
        names |= set(learner.update([*rows[:8], *older[8:]], 1).metrics)
        names |= set(learner.update([], 2).metrics)
    for changes in (
        {"loss": LossConfig(name="kimi"), "corrections": (CorrectionConfig(name="m2po"),)},
        {"advantage": AdvantageConfig(estimator="gae"), "critic": CriticConfig()},
        {"kl": KLConfig(coefficient=0.1)},
    ):
        names |= set(make_learner(directory, **changes).update(make_batch(0), 0).metrics)
    learner = make_learner(directory, streamed=True, minibatches=1)
    learner.stream(make_batch(0)[:4], 0)
    return names | set(learner.update(make_batch(0), 0).metrics)


def string_constants(file: str) -> set[str]:
    tree = ast.parse(text_of(ROOT / file))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_metric_of_a_row_is_in_the_glossary(learner_metrics: set[str]) -> None:
    documented = [pattern_of(name) for name in documented_metrics()]
    for key in sorted(gate_metrics() | learner_metrics):
        # "by family" rows are documented by their sum's name
        candidates = [key, *(key.removesuffix(f"/{family}") for family in FAMILIES)]
        assert any(pattern.fullmatch(name) for pattern in documented for name in candidates), f"{key} is not documented"
    for file in STAGE_FILES:
        for constant in string_constants(file):
            if re.fullmatch(r"(time|weights)/\w+", constant):
                assert any(pattern.fullmatch(constant) for pattern in documented), f"{constant} is not documented"


def test_every_metric_in_the_glossary_exists(learner_metrics: set[str]) -> None:
    measured = gate_metrics() | learner_metrics
    written = set().union(*(string_constants(file) for file in STAGE_FILES))
    rows = text_of(ROOT / "tasks/training/rows.py") + text_of(ROOT / "tasks/record/stage.py")
    for name in documented_metrics():
        pattern = pattern_of(name)
        literal = name.removeprefix("weights/")
        per_family = name.removesuffix("<family>")
        assert (
            any(pattern.fullmatch(key) or pattern.fullmatch(key.removesuffix("/maze")) for key in measured)
            or name in written
            or literal in written
            or (per_family != name and f'"{per_family}{{' in rows)
        ), f"{name} is in the glossary, and nothing writes it"


def test_the_quoted_shell_of_pages_can_be_read() -> None:
    for path in PAGES:
        for command in commands(path):
            if command.startswith(("make ", "python -m", "prefect ")):
                shlex.split(command, comments=True)
