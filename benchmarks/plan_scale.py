"""Time, CPU time, peak memory and proven gap of ``hwplan plan`` on large jobs.

    python benchmarks/plan_scale.py [--only TEXT] [--more] [--out FILE]

Each case is one fresh process, so times hold imports too. CPU time is what the process used
whatever else ran on the machine. ``--more`` adds every built-in model on ``mixed.yaml`` to the
cases that have goals.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLUSTERS = ROOT / "benchmarks" / "clusters"
MIXED = ROOT / "cluster_configs" / "mixed.yaml"
START = [sys.executable, "-c", "from runtime.cli.main import main; main()"]
MEMORY_GOAL_GIB = 4.0


@dataclass(frozen=True)
class Case:
    """One job, and what its planning may take."""

    model: str
    cluster: Path
    seconds: float
    gap: float

    @property
    def name(self) -> str:
        return f"{self.model} on {self.cluster.stem}"


@dataclass(frozen=True)
class Figures:
    """What planning took, and what it proved."""

    wall_s: float
    cpu_s: float
    peak_gib: float
    step_ms: float
    gap: float
    programs: int


GOALS = [
    Case("dlrm", MIXED, 5, 0.01),
    *(Case("de_medium", CLUSTERS / f"{d}_16x8.yaml", 30, 0.02) for d in ("b200", "mi350x", "h200")),
    *(Case("de_jumbo", CLUSTERS / f"{d}_32x8.yaml", 90, 0.03) for d in ("b200", "mi350x", "h200")),
    Case("hugectr_510t_110b_hot5", CLUSTERS / "mixed_4x8_4x8.yaml", 30, 0.02),
]


def more() -> list[Case]:
    """The other built-in models on ``mixed.yaml``, and the tight single node."""
    models = sorted(path.stem for path in (ROOT / "planner" / "models").glob("*.yaml"))
    known = {(case.model, case.cluster) for case in GOALS}
    cases = [Case(model, MIXED, 60, 0.01) for model in models if (model, MIXED) not in known]
    return [*cases, Case("de_large", ROOT / "cluster_configs" / "b200_1x8.yaml", 60, 0.01)]


def measure(case: Case) -> Figures:
    """Plan in a fresh process.

    Raises:
        RuntimeError: the process failed; its error output is the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        arguments = ["plan", "--cluster", str(case.cluster), "--model", case.model]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*START, *arguments, "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begin
        if status:
            raise RuntimeError(f"{case.name}: {errors.strip()}")
        plan = json.loads(out.read_text(encoding="utf-8"))
    predicted = plan["predicted"]
    return Figures(
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_gib=usage.ru_maxrss / 2**20,
        step_ms=predicted["step_ms"],
        gap=predicted["step_ms"] / predicted["lower_bound_ms"] - 1,
        programs=plan["solver"]["evaluated"],
    )


def reached(case: Case, figures: Figures) -> bool:
    """Whether all goals of the case are met (CPU time stands for time on a busy machine)."""
    seconds = min(figures.wall_s, figures.cpu_s)
    return (
        seconds <= case.seconds
        and figures.gap <= case.gap * (1 + 1e-9)
        and figures.peak_gib <= MEMORY_GOAL_GIB
    )


HEADER = f"{'case':46} {'wall s':>7} {'CPU s':>7} {'GiB':>6} {'step ms':>9} {'gap':>7}"


def line(case: Case, figures: Figures) -> str:
    """Under ``HEADER``."""
    return (
        f"{case.name:46} {figures.wall_s:7.1f} {figures.cpu_s:7.1f} {figures.peak_gib:6.2f} "
        f"{figures.step_ms:9.4f} {figures.gap:7.2%} {'' if reached(case, figures) else 'missed'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    results = []
    print(HEADER)
    for case in [*GOALS, *(more() if arguments.more else [])]:
        if arguments.only not in case.name:
            continue
        figures = measure(case)
        print(line(case, figures), flush=True)
        results.append({"case": case.name, **asdict(figures), "reached": reached(case, figures)})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
