"""Wall time of ``hwplan`` commands in fresh processes: median and worst of a few runs.

    python benchmarks/startup.py [--runs 5]

Goals: ``--help`` under 0.5 s; planning ``dlrm`` on ``mixed`` under 10 s on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "help": (["--help"], 0.5),
    "plan_help": (["plan", "--help"], 0.5),
    "models": (["models", "--json"], None),
    "devices": (["devices", "--json"], None),
    "plan_dlrm_on_mixed": (["plan", "--cluster", "mixed", "--model", "dlrm", "--json"], 10.0),
}
START = [sys.executable, "-c", "from runtime.cli.main import main; main()"]


def seconds(arguments: list[str], runs: int) -> list[float]:
    """Wall times of ``runs`` processes, after one that warms the file cache."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        subprocess.run([*START, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    result = {}
    for name, (arguments, goal_s) in COMMANDS.items():
        times = seconds(arguments, runs)
        median_s, worst_s = statistics.median(times), max(times)
        result[name] = {"median_s": median_s, "worst_s": worst_s, "goal_s": goal_s}
        print(f"{name}: median {median_s:.2f} s, worst {worst_s:.2f} s", file=sys.stderr)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
