"""The examples of docs/interchange.md, and the commands' contract."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.specs.load import load_model
from planner.specs.plan import load_plan
from tests.interchange.export_jobs import executed

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "cli"))

from cli_run import Result, assert_fails, hwplan  # noqa: E402

DOCS = (ROOT / "docs" / "interchange.md").read_text()
FILES = {"run.sh": "bash", "table_configs.json": "json", "constraints.yaml": "yaml"}


@pytest.fixture(scope="module", autouse=True)
def examples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, str, Result]]]:
    """(command, what it should print, what it did) of each example, run in a folder with the
    files that the documentation shows; the tests work there too."""
    before, path = Path.cwd(), tmp_path_factory.mktemp("docs")
    for name, language in FILES.items():
        found = re.search(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)
        assert found is not None
        (path / name).write_text(found[1])
    os.chdir(path)
    blocks = [
        block.partition("\n")
        for console in re.findall(r"```console\n(.*?)```", DOCS, re.DOTALL)
        for block in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]
    ]
    yield [(command, output, hwplan(*shlex.split(command)[1:])) for command, _, output in blocks]
    os.chdir(before)


def test_every_example_prints_what_the_documentation_says(
    examples: list[tuple[str, str, Result]],
) -> None:
    assert len(examples) == 7
    for command, output, result in examples:
        assert result.code == 0, (command, result.err)
        for part in output.split("...\n"):
            assert part in result.out, command


def test_what_the_examples_wrote() -> None:
    assert load_model("mlperf.yaml").all_tables == load_model("small.yaml").all_tables
    module = executed(Path("sharding.py").read_text())
    data = json.loads(Path("sharding.json").read_text())
    sharding = module["sharding_plan"]().plan["ebc"]
    assert {name: s.sharding_type for name, s in sharding.items()} == {
        name: s["sharding_type"] for name, s in data["plan"]["ebc"].items()
    }
    # The last plan is the one under constraints.
    placements = load_plan("plan.json").pools["b200"].placements
    kinds = [str(placements[name].sharding_type) for name in ("t_0", "t_1")]
    assert kinds == ["row_wise", "column_wise"]
    assert str(placements["t_2"].sharding_type) in ("table_wise", "row_wise")


def test_json_is_all_there_is_on_stdout() -> None:
    model = json.loads(hwplan("import", "run.sh", "--json").out)
    assert [table["num_embeddings"] for table in model["tables"]] == [40_000_000, 39_060, 17_295]
    for form in ("json", "python", "constraints"):
        result = hwplan("export", "plan.json", "--as", form, "--json")
        assert isinstance(json.loads(result.out), dict)
    text = hwplan("export", "plan.json", "--as", "constraints").out
    assert "t_1: {sharding_types: [column_wise], compute_kernels: [fused]" in text


def test_a_constrained_import_plans_alike() -> None:
    result = hwplan("import", "run.sh", "--constraints", "constraints.yaml", "--out", "c.yaml")
    assert result.code == 0
    constraints = {table.name: table.constraints for table in load_model("c.yaml").all_tables}
    assert constraints["t_1"].min_partition == 32
    assert load_plan("plan.json").model.all_tables == load_model("c.yaml").all_tables


def test_cpu_pools_are_exported_for_cpu_and_one_at_a_time() -> None:
    job = ("--cluster", "local", "--model", "dlrm_criteo_small", "--mip-gap", "0.05")
    assert hwplan("plan", *job, "--out", "two.json").code == 0
    assert_fails(hwplan("export", "two.json"), 2, "--pool", "fast, slow")
    data = json.loads(hwplan("export", "two.json", "--pool", "slow", "--first-rank", "1").out)
    assert (data["device_type"], data["first_rank"]) == ("cpu", 1)
    assert data["ranks"] * data["replica_groups"] == 3
    shards = [
        s
        for table in data["plan"][""].values()
        for s in (table["sharding_spec"] or {}).get("shards", [])
    ]
    assert shards and {s["placement"] for s in shards} <= {f"rank:{r}/cpu" for r in (1, 2, 3)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("import",), ["FILE", "--rows"]),
        (("import", "run.sh", "--rows", "3"), ["--rows", "one source"]),
        (("import", "--rows", "3,x", "--dim", "8"), ["--rows", "3,x", "commas"]),
        (("import", "--rows", "3"), ["--dim", "width"]),
        (("import", "--rows", "3,4", "--dim", "8,9"), ["--dim.1", "even"]),
        (("import", "--rows", "3,4", "--dim", "8", "--pooling", "1,2,3"), ["--pooling", "3 ent"]),
        (("import", "run.sh", "--dim", "8,16"), ["--dim", "one width"]),
        (("import", "nothing.sh"), ["nothing.sh", "does not exist"]),
        (("import", "run.sh", "--like", "nope"), ["unknown model", "dlrm"]),
        (("import", "run.sh", "--out", "/no/such/m.yaml"), ["--out", "mkdir"]),
        (("import", "run.sh", "--top-mlp", "8,2"), ["top_mlp", "end top_mlp with 1"]),
        (("import", "run.sh", "--zipf-exponent", "inf"), ["zipf_exponent"]),
        (("export", "run.sh"), ["run.sh", "not valid JSON"]),
        (("export", "plan.json", "--pool", "amd"), ["--pool", "b200"]),
        (("export", "plan.json", "--as", "constraints", "--pool", "x"), ["--pool", "b200"]),
        (("plan", "--cluster", "b200_1x8", "--model", "dlrm", "--constraints", "constraints.yaml"),
         ["constraints.yaml", "no such table", "t_0"]),
    ],
)  # fmt: skip
def test_bad_usage_is_code_2(arguments: tuple[str, ...], words: list[str]) -> None:
    assert_fails(hwplan(*arguments), 2, *words)
